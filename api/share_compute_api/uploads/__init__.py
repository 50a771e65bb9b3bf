"""Data and models that people send to the server, for jobs to name as ``upload:ID``.

An upload is open while its files arrive, and complete from one moment to the next: nothing names an open one.
"""
