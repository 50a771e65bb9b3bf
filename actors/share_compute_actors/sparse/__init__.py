"""Actors of sparse models: servers that hold ranges of rows, workers that hold data, and the run that watches them."""
