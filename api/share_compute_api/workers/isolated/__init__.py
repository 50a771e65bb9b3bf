"""Processes submitters' content in isolated processes, which have limited memory and time, and no secrets."""
