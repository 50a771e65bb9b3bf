"""Output of commands: tables, progress, diagrams, and shell completion."""
