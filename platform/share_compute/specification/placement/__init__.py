"""Where a job is placed: the field ``parallelism``, and pinned plans."""
