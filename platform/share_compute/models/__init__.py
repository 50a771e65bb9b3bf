"""Models cut into stages: built, loaded and written shard by shard."""
