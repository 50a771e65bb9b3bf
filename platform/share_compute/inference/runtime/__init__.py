"""Computation in the members of a deployment: running shards, keeping KV slots, and sampling tokens."""
