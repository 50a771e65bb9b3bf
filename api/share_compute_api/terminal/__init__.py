"""Output of commands: tables, progress, pictures, and shell completion."""
