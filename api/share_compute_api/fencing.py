"""The end of a server whose database another server took over."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from share_compute.errors import Fenced
from share_compute_actors.machine.processes import Roster
from share_compute_api.cli.output import print_failure

_GRACE_S = 2.5
"""Time to end in order: with the second in which it is noticed, the process is gone within 5 s."""


def ends_within_grace(roster: Roster) -> Callable[[Fenced], None]:
    """Return a function that ends this process soon after it is called, with its children, however busy it is.

    Args:
        roster: the children.
    """

    def force(failure: Fenced) -> None:
        try:
            print_failure(failure, as_json="--json" in sys.argv)
            roster.kill_all()
        finally:
            os._exit(failure.exit_code)

    def end(failure: Fenced) -> None:
        timer = threading.Timer(_GRACE_S, force, (failure,))
        timer.daemon = True  # a process that ends in order does not wait for it
        timer.start()

    return end
