"""Sums tensors over the members of a stage, as a backend of Ray's collective API."""
