"""Fleets that we do not have: synthetic machines that come and go, and a job among them on a simulated clock."""
