"""Code for one machine of the cluster: checks and measurements, its Ray node, and its child processes."""
