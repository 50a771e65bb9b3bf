"""Routes of machines, invites and the cluster."""
