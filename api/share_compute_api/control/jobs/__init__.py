"""Supervises jobs: allotting machines, coordinators, events, and what follows the end of an attempt."""
