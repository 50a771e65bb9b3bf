"""Deployments inside Ray: the server with its scheduler, members with shards and KV caches, and `ServedWeights`."""
