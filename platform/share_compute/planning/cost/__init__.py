"""The cost model of a plan: compute, transfers, memory, and the schedule of a step."""
