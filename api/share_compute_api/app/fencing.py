"""Fencing: the end of a server whose database another server took over."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from share_compute.errors import Fenced
from share_compute_actors.machine.processes import ChildProcesses
from share_compute_api.terminal.output import print_failure

_GRACE_S = 2.5
"""Time for an orderly end, in seconds; with the second until it is noticed, the process is gone within 5 s."""


def ends_within_grace(children: ChildProcesses) -> Callable[[Fenced], None]:
    """Return a function that ends this process and its children after a grace period, however busy the process is.

    Args:
        children: the child processes.
    """

    def force(failure: Fenced) -> None:
        try:
            print_failure(failure, as_json="--json" in sys.argv)
            children.kill_all()
        finally:
            os._exit(failure.exit_code)

    def end(failure: Fenced) -> None:
        timer = threading.Timer(_GRACE_S, force, (failure,))
        timer.daemon = True  # a process that ends earlier must not wait for the timer
        timer.start()

    return end
