"""Isolated processes for submitters' content: limited memory and time, no secrets, and restarted after a crash."""
