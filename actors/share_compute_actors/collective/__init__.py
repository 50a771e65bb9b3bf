"""Sums over the members of a pool, behind Ray's collective API."""
