"""Fault injection: scripts that make processes fail at given points of the protocol, in given steps and members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from share_compute.errors import UserError
from share_compute.protocol.membership import Worker
from share_compute.protocol.points import Point


class FailureKind(Enum):
    """Kind of an injected failure."""

    kill = "kill"
    """The process ends at once, and its state is lost."""
    stop = "stop"
    """The process stalls for a while, with its sockets open. Then it continues as if nothing had happened."""
    partition = "partition"
    """The process and the failure's ``peers`` cannot reach each other for a while. See `InjectedFailure`."""
    delay = "delay"
    """The message that is sent at the failure's `Point` arrives later."""
    duplicate = "duplicate"
    """The message that is sent at the failure's `Point` arrives twice."""
    reorder = "reorder"
    """The message that is sent at the failure's `Point` is overtaken by the next message on the same route."""
    drop = "drop"
    """The message that is sent at the failure's `Point` never arrives."""
    corrupt = "corrupt"
    """The message that is sent at the failure's `Point` arrives with a flipped bit."""
    reshape = "reshape"
    """The tensor that is sent at the failure's `Point` has a wrong shape."""
    retype = "retype"
    """The tensor that is sent at the failure's `Point` has a wrong dtype."""
    resize = "resize"
    """The tensor that is sent at the failure's `Point` has too few bytes for its shape."""
    poison = "poison"
    """The numbers that the process computes or sends at the failure's `Point` are not finite."""
    deviate = "deviate"
    """The numbers that the process computes or sends at the failure's `Point` are finite but wrong."""
    accuse = "accuse"
    """The process rejects the tensor that arrives at the failure's `Point`, although the tensor is correct."""

    def __str__(self) -> str:
        return self.value

    @property
    def is_of_message(self) -> bool:
        """Whether the failure affects one message, which is sent at the failure's `Point`."""
        of_process = FailureKind.kill, FailureKind.stop, FailureKind.partition, FailureKind.accuse
        return self not in (*of_process, *_MADE)

    @property
    def is_wrong_number(self) -> bool:
        """Whether a member produces or sends a tensor or digest of wrong shape, dtype, size or value.

        False for `corrupt`, which damages a message in transit.
        """
        return self in _MISFITS or self in _MADE

    @property
    def is_offence(self) -> bool:
        """Whether the machine is at fault: it computes or sends wrong numbers, or rejects a correct tensor."""
        return self.is_wrong_number or self is FailureKind.accuse

    @property
    def lasts(self) -> bool:
        """Whether the failure has a duration."""
        return self in (FailureKind.stop, FailureKind.partition, FailureKind.delay)


_MISFITS = frozenset({FailureKind.reshape, FailureKind.retype, FailureKind.resize})
_MADE = frozenset({FailureKind.poison, FailureKind.deviate})
_MAKING = frozenset({Point.tensor_sending, Point.cell_starting, Point.reduce_done, Point.prepared_sending})
"""Points at which a member computes numbers, or sends numbers or their digest."""


@dataclass(frozen=True, slots=True)
class InjectedFailure:
    """One failure, which happens once.

    Args:
        kind: kind of the failure.
        point: point of the protocol; its ``role`` says whether members or the coordinator pass it.
        worker: member at which it happens; None for any member, and for points of the coordinator.
        step: open step in which it happens; None: any step.
        occurrence: the number of the pass through the point at which the failure happens, from 1. Only passes that
            match ``worker`` and ``step`` count.
        duration_s: duration in seconds, for a kind that has one.
        peers: members that a partition separates from the process. Without peers, a partition separates it
            from all other processes.

    Raises:
        UserError: the arguments do not fit together.
    """

    kind: FailureKind
    point: Point
    worker: Worker | None = None
    step: int | None = None
    occurrence: int = 1
    duration_s: float = 0.0
    peers: frozenset[Worker] = frozenset()

    def __post_init__(self) -> None:
        if self.kind.is_of_message and not self.point.is_sending:
            sending = ", ".join(sorted(point.name for point in Point if point.is_sending))
            raise UserError(
                f"nothing is sent at {self.point.name}, so there is nothing to {self.kind}",
                hint=f"choose one of {sending}",
            )
        if self.kind.is_wrong_number and self.point not in _MAKING:
            raise UserError(
                f"no numbers are made or sent at {self.point.name}",
                hint="choose one of " + ", ".join(sorted(point.name for point in _MAKING)),
            )
        if self.kind is FailureKind.accuse and self.point is not Point.tensor_received:
            raise UserError(f"no tensor arrives at {self.point.name}", hint="choose tensor_received")
        if self.worker is not None and self.point.role == "coordinator":
            raise UserError(
                f"{self.point.name} is a point of the coordinator, not of {self.worker}",
                hint="leave the worker out, or choose a point of a member",
            )
        if self.kind.lasts != (self.duration_s > 0):
            wrong = f"a {self.kind} of {self.duration_s} s"
            hint = "give a duration_s above 0" if self.kind.lasts else "leave duration_s out"
            raise UserError(wrong, hint=hint)
        if self.occurrence < 1:
            raise UserError(f"occurrence {self.occurrence} of {self.point.name}", hint="count from 1")
        if self.peers and self.kind is not FailureKind.partition:
            raise UserError(f"a {self.kind} has no peers", hint="leave peers out, or choose partition")


class FailureScript:
    """Selects the failures that are due when a process passes a point. Each failure happens once.

    Args:
        failures: failures in any order; several may be due at one passing.
    """

    def __init__(self, failures: Sequence[InjectedFailure] = ()) -> None:
        self._waiting = list(failures)
        self._seen: Counter[int] = Counter()

    @property
    def waiting(self) -> tuple[InjectedFailure, ...]:
        """Failures that have not happened yet."""
        return tuple(self._waiting)

    def passes(self, point: Point, worker: Worker | None, step: int) -> list[InjectedFailure]:
        """Record that a process passes a point, and return the failures that are now due.

        Args:
            point: point that is passed.
            worker: the member; None for the coordinator.
            step: open step of the process.
        """
        due = []
        for failure in list(self._waiting):
            if failure.point is point and failure.worker in (None, worker) and failure.step in (None, step):
                self._seen[id(failure)] += 1
                if self._seen[id(failure)] == failure.occurrence:
                    self._waiting.remove(failure)
                    due.append(failure)
        return due
