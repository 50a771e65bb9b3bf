"""Supervises batches: runs their attempts and measures the rate of answered rows."""
