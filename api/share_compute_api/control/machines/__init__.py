"""Supervises contributors: checks their nodes, measures them, and builds the topology of present machines."""
