"""Serves deployments with Ray actors: a server with the scheduler, members with shards, and `ServedWeights`."""
