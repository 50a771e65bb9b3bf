"""Processes for submitters' content: their memory and time are limited, they hold no secrets, and they may fail."""
