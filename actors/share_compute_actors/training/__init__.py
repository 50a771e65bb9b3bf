"""Training jobs as actors: the coordinator of an attempt, its members, and their backup copies."""
