"""Supervises batches: attempts, and their pace beside other requests."""
