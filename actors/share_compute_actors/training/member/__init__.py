"""A member, which is the actor that holds one shard on one contributor, and everything else in its process."""
