"""Samples: text and data sets that ship with packages, cut into steps and microbatches."""
