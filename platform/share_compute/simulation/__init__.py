"""Simulated fleets: synthetic machines that join and leave, and a job on them, on a simulated clock."""
