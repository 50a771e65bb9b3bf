"""The coordinator: the actor on the head that leads one attempt at a job, and the shard store beside it."""
