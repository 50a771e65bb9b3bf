"""Batches without a model: rows of files, answers that are kept part by part, and the output that they make up."""
