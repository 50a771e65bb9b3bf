"""For tests and benchmarks: public failure injection, and a mailbox for who leads a crew without being an actor.

The script is the one that drives the simulated world (`share_compute.protocol.failures`): give it to an attempt by
`Assignment.failures`, and every process of it carries out what concerns itself.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import ray

from share_compute.errors import UserError
from share_compute.protocol.failures import Failure, FailureKind, FailureScript
from share_compute.protocol.points import Point
from share_compute.protocol.roster import Worker

_NOT_PASSED = {Point.log_sending, Point.log_heard}
_WAKE = (
    "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), signal.SIGCONT)"
)


def require_carried_out(failures: Sequence[Failure]) -> None:
    """See that a script holds only what real processes carry out.

    Raises:
        UserError: the coordinator's points, and messages that come late, in another order or damaged, are for the
            simulated world.
    """
    for failure in failures:
        is_sent_twice = failure.kind is FailureKind.duplicate and failure.point is Point.tensor_sending
        is_process = failure.kind in (FailureKind.kill, FailureKind.stop) and failure.point.role == "member"
        if not (is_sent_twice or is_process) or failure.point in _NOT_PASSED:
            raise UserError(
                f"a {failure.kind} at {failure.point.name} is not carried out in real processes",
                mend="kill or stop a member, or duplicate what it sends (tensor_sending)",
            )


class Injector:
    """One process's part of a script.

    Args:
        failures: the script.
        worker: the member that this process is; None of the coordinator.
    """

    def __init__(self, failures: Sequence[Failure], worker: Worker | None) -> None:
        self._worker = worker
        self._script = FailureScript(failures)

    def passes(self, point: Point, step: int) -> frozenset[FailureKind]:
        """Pass a point; return what happens to the message that leaves here, if one does.

        A kill ends this process at once; a stop freezes it with its sockets open, and another process wakes it.
        """
        kinds = set()
        for failure in self._script.passes(point, self._worker, step):
            if failure.kind is FailureKind.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            elif failure.kind is FailureKind.stop:
                subprocess.Popen(  # it outlives this call on purpose
                    [sys.executable, "-c", _WAKE, str(os.getpid()), str(failure.duration_s)],
                    start_new_session=True,
                )
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                kinds.add(failure.kind)
        return frozenset(kinds)


@ray.remote(num_cpus=0, concurrency_groups={"mail": 1, "control": 1})
class Mailbox:
    """Stands where members expect their coordinator, for a process that is no actor."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    @ray.method(concurrency_group="mail")
    def hear(self, *said: Any) -> None:
        """Take in what a member says."""
        self._heard.put(said)

    @ray.method(concurrency_group="control")
    def next(self) -> tuple[Any, ...]:
        """Wait for what comes next, and return it."""
        return self._heard.get()


def forward_mail(mailbox: Any) -> queue.SimpleQueue[Any]:
    """Return a queue that gets everything a `Mailbox` hears, for as long as that lives."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def carry() -> None:
        while True:
            try:
                inbox.put(ray.get(mailbox.next.remote()))
            except ray.exceptions.RayError:
                return

    threading.Thread(target=carry, daemon=True).start()
    return inbox
