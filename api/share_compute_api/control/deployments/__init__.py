"""Supervises deployments: starts replicas, assigns machines to them, and drains them."""
