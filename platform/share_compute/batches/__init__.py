"""Batches without a model: input rows from files, answers stored in parts, and the output file made from them."""
