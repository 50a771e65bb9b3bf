"""Plans: which layers go to which machines, and why."""
