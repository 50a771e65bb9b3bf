"""Models split into stages: built, loaded and written shard by shard."""
