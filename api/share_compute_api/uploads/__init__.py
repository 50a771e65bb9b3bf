"""Data and models that users send to the server, for jobs to name as ``upload:ID``.

An upload is open while its files arrive. It becomes complete at one moment, and jobs cannot name an open one.
"""
