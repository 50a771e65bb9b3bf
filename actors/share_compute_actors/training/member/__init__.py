"""The member (the actor that holds one shard on one contributor), and the other code of its process."""
