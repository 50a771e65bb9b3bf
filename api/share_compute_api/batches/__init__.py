"""Batches: checks at submission, requests for single rows, and attempts at whole batches."""
