"""The search for a plan, and the pluggable partitioning strategies."""
