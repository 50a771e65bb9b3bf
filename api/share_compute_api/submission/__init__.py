"""Checks jobs, deployments and batches before they are accepted."""
