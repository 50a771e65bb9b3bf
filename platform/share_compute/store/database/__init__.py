"""Access to the database: transactions, tables, page cursors, backups, a lock and a fence against other servers."""
