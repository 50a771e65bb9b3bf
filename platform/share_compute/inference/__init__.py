"""Serve models: place and scale deployments, schedule their sequences, and compute tokens in their members."""
