"""Isolated processes that all servers in one process of the tests share; starting some for each takes seconds."""

from __future__ import annotations

from functools import cache

from share_compute_api.workers.isolated.pool import IsolatedProcesses


@cache
def shared_processes() -> IsolatedProcesses:
    """Return the processes; they end with the process that calls this first."""
    return IsolatedProcesses()
