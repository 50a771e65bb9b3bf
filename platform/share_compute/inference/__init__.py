"""Serving of models: placement and scaling of deployments, scheduling of sequences, and computation of tokens."""
