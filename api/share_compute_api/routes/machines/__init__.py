"""Routes for machines, invites and the cluster."""
