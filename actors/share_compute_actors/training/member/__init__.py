"""The member (the actor that holds one shard on one contributor) and the classes that it uses."""
