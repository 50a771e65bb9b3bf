"""Backup copies of other members' shards, so that a job loses no committed step when a machine is lost."""
