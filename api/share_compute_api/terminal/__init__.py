"""Helpers for the commands: output for people and scripts, shell completion, shared options, signals."""
