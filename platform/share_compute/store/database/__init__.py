"""Access to the database: transactions, tables, a lock and a fencing token against other servers, and backups."""
