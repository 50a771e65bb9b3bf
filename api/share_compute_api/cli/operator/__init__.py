"""Commands for people who run a cluster."""
