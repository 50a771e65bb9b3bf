"""Serve models: place and scale deployments, schedule sequences, and compute tokens."""
