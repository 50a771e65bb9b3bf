"""Fencing: ends a server process whose database was taken over by another server."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from share_compute.errors import Fenced
from share_compute_actors.machine.processes import ChildProcesses
from share_compute_api.terminal.output import print_failure

_GRACE_S = 2.5
"""Time for an orderly shutdown, in seconds. Detection takes 1 s more, so the process ends within 5 s in total."""


def ends_within_grace(children: ChildProcesses) -> Callable[[Fenced], None]:
    """Return a function that kills this process and its children after `_GRACE_S`, even if the event loop is blocked.

    Args:
        children: the child processes to kill.
    """

    def force(failure: Fenced) -> None:
        try:
            print_failure(failure, as_json="--json" in sys.argv)
            children.kill_all()
        finally:
            os._exit(failure.exit_code)

    def end(failure: Fenced) -> None:
        timer = threading.Timer(_GRACE_S, force, (failure,))
        timer.daemon = (
            True  # a daemon thread, so that a process that ends earlier does not wait for the timer
        )
        timer.start()

    return end
