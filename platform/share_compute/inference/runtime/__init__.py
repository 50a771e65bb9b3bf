"""Computation in a member of a deployment: stages, KV slots, packed weights, sampling."""
