"""Validates jobs, deployments and batches before they are accepted."""
