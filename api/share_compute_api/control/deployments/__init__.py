"""Supervises deployments: replicas, their placement, and drains."""
