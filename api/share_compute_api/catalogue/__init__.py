"""The catalogue of the models that can be served here."""
