"""Deployments inside Ray: the server that schedules, members with shards and caches, and who gives them weights."""
