"""Copies of other members' shards, kept so that a machine's death loses nothing."""
