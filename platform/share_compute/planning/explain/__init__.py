"""Reasons for a plan, and for its absence."""
