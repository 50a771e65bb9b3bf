"""Backup copies of other members' shards, so that the death of a machine loses no state."""
