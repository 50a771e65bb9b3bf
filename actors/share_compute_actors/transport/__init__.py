"""Tensors, pieces of files and sums between members."""
