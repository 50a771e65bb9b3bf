"""Commands for people who train and serve models."""
