"""Migrations, one module for each change of the schema."""
