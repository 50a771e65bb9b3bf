"""A member: the actor that holds one shard on one contributor, and all that lives in its process."""
