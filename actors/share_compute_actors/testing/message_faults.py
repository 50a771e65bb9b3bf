"""Fault injection into the messages that one process sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from itertools import count

import torch
from torch import Tensor

from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.membership import Worker
from share_compute_actors.transport.channel import EncodedTensor

Send = Callable[[], None]
_NOT_OVERTAKEN_S = 2.0
"""Time in seconds after which a reordered message is sent even if no later message has overtaken it."""


class MessageFaults:
    """Sends messages, and injects faults: damage, delay, duplication, reordering and loss.

    All methods except `is_cut` and `wait_while_cut` must be called on one thread, which must call `flush` regularly.
    """

    def __init__(self) -> None:
        self._late: list[tuple[float, int, Send]] = []
        self._held: dict[Worker | None, Send] = {}
        self._numbers = count()
        self._cuts: list[tuple[float, frozenset[Worker]]] = []

    def send(
        self,
        target: Worker | None,
        send: Send,
        failures: Collection[InjectedFailure] = (),
        send_damaged: Send | None = None,
    ) -> None:
        """Send a message with its injected faults.

        Args:
            target: the receiver; None for the coordinator.
            send: sends the message.
            failures: faults that apply to the message.
            send_damaged: sends the message with a flipped bit; required if a fault is `FailureKind.corrupt`.
        """
        by_kind = {failure.kind: failure for failure in failures}
        if FailureKind.drop in by_kind or self.is_cut(target):
            return
        if FailureKind.corrupt in by_kind:
            assert send_damaged is not None
            send = send_damaged
        if FailureKind.reorder in by_kind:
            self._held[target] = send
            self._after(_NOT_OVERTAKEN_S, lambda: self._release(target, send))
            return
        for _ in range(2 if FailureKind.duplicate in by_kind else 1):
            if FailureKind.delay in by_kind:
                self._after(by_kind[FailureKind.delay].duration_s, send)
            else:
                send()
        if target in self._held:
            self._held.pop(target)()

    def flush(self) -> float | None:
        """Send all delayed messages that are due.

        Return the seconds until the next delayed message is due; None if no message is left.
        """
        while self._late:
            left_s = self._late[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            heappop(self._late)[2]()
        return None

    def forget(self) -> None:
        """Drop all messages that are delayed or held back; call this method when an epoch ends."""
        self._late.clear()
        self._held.clear()

    def _after(self, delay_s: float, send: Send) -> None:
        heappush(self._late, (time.monotonic() + delay_s, next(self._numbers), send))

    def _release(self, target: Worker | None, send: Send) -> None:
        if self._held.get(target) is send:
            self._held.pop(target)()

    # -- partitions --------------------------------------------------------------------------------------------------

    def cut(self, partition: InjectedFailure) -> None:
        """Cut the links to the peers of ``partition`` for its duration; an empty set of peers stands for all."""
        self._cuts.append((time.monotonic() + partition.duration_s, partition.peers))

    def is_cut(self, other: Worker | None) -> bool:
        """Return whether the link to another member is cut now; None stands for the coordinator."""
        return self._cut_until_s(other) > time.monotonic()

    def wait_while_cut(self) -> None:
        """Wait until the link to the coordinator is not cut."""
        while (left_s := self._cut_until_s(None) - time.monotonic()) > 0:
            threading.Event().wait(left_s)

    def _cut_until_s(self, other: Worker | None) -> float:
        return max((until_s for until_s, peers in self._cuts if not peers or other in peers), default=0.0)


# -- wrong numbers ---------------------------------------------------------------------------------------------------


def _has(failures: Sequence[InjectedFailure], kind: FailureKind) -> bool:
    return any(failure.kind is kind for failure in failures)


def wrong_tensor(tensor: Tensor, failures: Sequence[InjectedFailure]) -> Tensor:
    """Return a faulty version of ``tensor`` to send, or ``tensor`` itself if none of the failures changes tensors."""
    if _has(failures, FailureKind.reshape):
        return tensor.unsqueeze(0)
    if _has(failures, FailureKind.retype):
        return tensor.to(torch.float64)
    if _has(failures, FailureKind.poison):
        # Scales of a compressed tensor are bfloat16: bytes of 255 are NaN.
        return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 255)
    return tensor + 1 if _has(failures, FailureKind.deviate) else tensor


def faulty_encoding(encoded: EncodedTensor, failures: Sequence[InjectedFailure]) -> EncodedTensor:
    """Return ``encoded`` without its last byte if one of the failures is a resize; otherwise ``encoded`` itself."""
    return encoded.shortened() if _has(failures, FailureKind.resize) else encoded


def is_poisoned(failures: Sequence[InjectedFailure]) -> bool:
    """Return whether one of these failures is a poison: it replaces computed numbers by NaN."""
    return _has(failures, FailureKind.poison)


def deviates(failures: Sequence[InjectedFailure]) -> bool:
    """Return whether one of these failures makes a gradient or its digest wrong."""
    return _has(failures, FailureKind.deviate)
