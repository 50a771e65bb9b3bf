"""Supervises contributors: nodes, measurements, and the live topology."""
