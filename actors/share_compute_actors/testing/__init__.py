"""Fault injection for tests and benchmarks."""
