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
from typing import Any, Literal

import ray

from share_compute.errors import Conflict, UserError
from share_compute.protocol.failures import Failure, FailureKind, FailureScript
from share_compute.protocol.points import SENDING, Point
from share_compute.protocol.roster import Worker
from share_compute_actors.member.mishaps import Mishaps
from share_compute_actors.member.naming import members_of

_WORDS = frozenset(SENDING.values())
_TENSORS = frozenset({Point.tensor_sending, Point.log_sending})
_WAKE = (
    "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), signal.SIGCONT)"
)


def require_carried_out(failures: Sequence[Failure]) -> None:
    """See that a script holds only what real processes carry out.

    Raises:
        UserError: some of it is for the simulated world alone.
    """
    for failure in failures:
        if not _is_carried_out(failure):
            raise UserError(
                f"a {failure.kind} at {failure.point.name} is not carried out in real processes",
                mend="damage only tensors (tensor_sending, log_sending), and cut off only members",
            )


def _is_carried_out(failure: Failure) -> bool:  # noqa: PLR0911 - a return for each kind
    match failure.kind:
        case FailureKind.kill | FailureKind.stop:
            return True
        case FailureKind.partition:
            return failure.point.role == "member"
        case FailureKind.corrupt:
            return failure.point in _TENSORS
        case FailureKind.reshape | FailureKind.retype | FailureKind.resize:
            return failure.point is Point.tensor_sending
        case FailureKind.poison:
            return failure.point in (Point.tensor_sending, Point.cell_starting)
        case FailureKind.deviate:
            return failure.point in (Point.tensor_sending, Point.reduce_done, Point.prepared_sending)
        case FailureKind.accuse:
            return True
        case _:
            return failure.point in _TENSORS or failure.point in _WORDS


class Injector:
    """One process's part of a script.

    Args:
        failures: the script.
        worker: the member that this process is; None of the coordinator.
    """

    def __init__(self, failures: Sequence[Failure], worker: Worker | None) -> None:
        self._worker = worker
        self._script = FailureScript(failures)
        self.mishaps = Mishaps()
        """Sends the messages that something happens to."""

    def passes(self, point: Point, step: int) -> list[Failure]:
        """Pass a point; return what happens to the message that leaves here, if one does.

        A kill ends this process at once; a stop freezes it with its sockets open, and another process wakes it. A
        partition cuts it off from members and the coordinator; the sums that members of its pool form go through, since
        they have sockets of their own.
        """
        of_message = []
        for failure in self._script.passes(point, self._worker, step):
            match failure.kind:
                case FailureKind.kill:
                    kill()
                case FailureKind.stop:
                    freeze(failure.duration_s)
                case FailureKind.partition:
                    self.mishaps.cut(failure)
                case _:
                    of_message.append(failure)
        return of_message


def kill() -> None:
    """End this process at once, with all that it holds."""
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(duration_s: float) -> None:
    """Let this process stand still for a while, with its sockets open; another one wakes it."""
    subprocess.Popen(  # it outlives this call on purpose
        [sys.executable, "-c", _WAKE, str(os.getpid()), str(duration_s)],
        start_new_session=True,
    )
    # To this thread: of a signal to the process, another thread takes notice, and this one goes on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def make_fail(job_id: str, worker: Worker, kind: Literal["kill", "stop"], duration_s: float = 0.0) -> None:
    """Let a member of a running job fail now; returns before it does.

    Args:
        job_id: the job.
        worker: contributor of the member.
        kind: what goes wrong.
        duration_s: how long it stands still.

    Raises:
        Conflict: no member of the job runs there.
    """
    members = members_of(job_id, worker)
    if not members:
        raise Conflict(
            f"no member of the job runs on {worker} now",
            mend="choose another machine of its plan",
            job=job_id,
        )
    for member in members:
        member.fail.remote(kind, duration_s)


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
