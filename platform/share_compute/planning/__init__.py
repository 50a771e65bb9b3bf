"""Plans: the layers of each machine, with predicted times and reasons."""
