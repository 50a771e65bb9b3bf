"""Supervises training jobs: offers machines, starts coordinators, records events, and retries failed attempts."""
