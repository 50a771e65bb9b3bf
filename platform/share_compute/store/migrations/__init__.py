"""Migrations of the schema, run by `share_compute.store.upgrade`."""
