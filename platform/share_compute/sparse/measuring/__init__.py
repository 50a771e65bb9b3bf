"""Measures sparse models on rows that they are not trained on."""
