"""The scheduler of a deployment, a pure state machine: batches, KV capacity, fairness, limits."""
