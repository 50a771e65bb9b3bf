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
"""Time for an orderly shutdown, in seconds. With 1 s for detection, the process ends within 5 s of the takeover."""


def ends_within_grace(children: ChildProcesses) -> Callable[[Fenced], None]:
    """Return a function that kills ``children`` and this process `_GRACE_S` seconds after its call.

    The function starts a timer in a new thread, which also fires while the event loop is blocked.
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
