"""Data, models and tokenizers that users upload to the server, and that jobs refer to as ``upload:ID``.

An upload is open while its files arrive, then complete. Jobs can use only complete uploads.
"""
