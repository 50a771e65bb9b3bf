"""Measures sparse models on rows that are not used for training."""
