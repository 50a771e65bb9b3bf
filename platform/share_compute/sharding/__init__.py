"""Execution of sharded operators: plans of operators and the function `shard`, on devices of one process group."""
