"""Specification of jobs of kind sparse."""
