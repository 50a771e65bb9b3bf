"""Fault injection into the processes of a training job, for tests and benchmarks.

The failure script has the same format as in the simulation (`share_compute.protocol.failures`). To use a script, pass
it to an attempt in `Assignment.failures`. The coordinator and each member then execute their own parts of the script.
"""

from __future__ import annotations

from collections.abc import Sequence

from share_compute.errors import UserError
from share_compute.protocol.failures import FailureKind, FailureScript, InjectedFailure
from share_compute.protocol.membership import Worker
from share_compute.protocol.points import SENDING, Point
from share_compute_actors.group.failing import freeze, kill
from share_compute_actors.testing.message_faults import MessageFaults

_WORDS = frozenset(SENDING.values())
_TENSORS = frozenset({Point.tensor_sending, Point.log_sending})


def require_carried_out(failures: Sequence[InjectedFailure]) -> None:
    """Check that real processes can execute all failures of a script.

    Raises:
        UserError: one of the failures exists only in the simulation.
    """
    for failure in failures:
        if not _is_carried_out(failure):
            raise UserError(
                f"a {failure.kind} at {failure.point.name} is not carried out in real processes",
                hint="damage only tensors (tensor_sending, log_sending), and cut off only members",
            )


def _is_carried_out(failure: InjectedFailure) -> bool:  # noqa: PLR0911 - one return for each kind
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


class FaultInjector:
    """Executes one process's part of a failure script.

    Args:
        failures: the complete script.
        worker: the member that runs in this process; None for the coordinator.
    """

    def __init__(self, failures: Sequence[InjectedFailure], worker: Worker | None) -> None:
        self._worker = worker
        self._script = FailureScript(failures)
        self.messages = MessageFaults()
        """Sends this process's messages, and injects faults into them."""

    def passes(self, point: Point, step: int) -> list[InjectedFailure]:
        """Execute the kills, stops and partitions that are due at a protocol point; return the other due failures.

        The caller must apply the returned failures to the message or tensor at this point.

        A kill ends this process at once. A stop suspends this process with its sockets open, until a helper process
        resumes it. A partition cuts the links to the partition's peers, or to all processes if the partition names no
        peers. Collective operations of the stage still work, because they use separate sockets.
        """
        of_message = []
        for failure in self._script.passes(point, self._worker, step):
            match failure.kind:
                case FailureKind.kill:
                    kill()
                case FailureKind.stop:
                    freeze(failure.duration_s)
                case FailureKind.partition:
                    self.messages.cut(failure)
                case _:
                    of_message.append(failure)
        return of_message
