"""Explanations: why a plan was chosen, and why a job has no plan."""
