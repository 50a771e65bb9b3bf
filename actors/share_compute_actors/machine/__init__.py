"""One machine of the cluster: its capabilities, its Ray node, its processes."""
