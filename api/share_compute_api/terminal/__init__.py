"""What commands print: tables, progress, pictures, and shell completion."""
