"""Computation in a member of a deployment: it runs a shard, keeps KV slots, and samples tokens."""
