"""Compiled code of layers: its measurement, the choice between compiled and eager code, and artifacts on disk."""
