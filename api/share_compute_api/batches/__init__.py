"""Batches: what is checked when one is submitted, how one row is asked for, and one attempt at all of them."""
