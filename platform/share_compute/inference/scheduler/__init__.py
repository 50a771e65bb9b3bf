"""The scheduler of a replica, a pure state machine: it forms batches, assigns KV capacity, and serves owners fairly."""
