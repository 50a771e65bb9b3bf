"""Data, models and tokenizers that users upload to the server, and that jobs refer to as ``upload:ID``.

An upload is open while its files arrive. The upload then becomes complete in one atomic step; jobs cannot use an open
one.
"""
