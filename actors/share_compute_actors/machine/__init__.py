"""One machine of the pool: what it can do, its Ray node, its processes."""
