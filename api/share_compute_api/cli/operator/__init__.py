"""Commands of people who run a cluster."""
