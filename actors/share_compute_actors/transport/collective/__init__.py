"""Sums over the members of a stage, behind Ray's collective API."""
