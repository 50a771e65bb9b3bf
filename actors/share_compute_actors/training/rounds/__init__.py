"""Jobs whose branches train apart and merge in rounds: one synchronizer, and one coordinator for each branch."""
