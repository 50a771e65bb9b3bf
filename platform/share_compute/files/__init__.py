"""Access to files, and checks of data from files and requests."""
