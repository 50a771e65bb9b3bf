"""Commands of people who train and serve models."""
