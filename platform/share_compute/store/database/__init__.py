"""The database itself: connections, tables, fencing and backups."""
