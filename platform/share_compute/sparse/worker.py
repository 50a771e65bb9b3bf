"""Protocol of a worker: pulls, an update for each minibatch, and pushes that are repeated until acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from share_compute.errors import VerificationFailed


@dataclass(frozen=True, slots=True)
class RowsPulled:
    """A range answered a pull."""

    range: int
    clock: int
    """Number of pushes that the worker had made when it asked."""


@dataclass(frozen=True, slots=True)
class UpdateComputed:
    """The update of a minibatch is ready for all ranges."""

    clock: int


@dataclass(frozen=True, slots=True)
class PushAcknowledged:
    """A range has all pushes of the worker up to a clock, on two machines."""

    range: int
    clock: int


@dataclass(frozen=True, slots=True)
class PushExpected:
    """A range lacks a push of the worker."""

    range: int
    clock: int
    acknowledged: int
    """Last push that the range had acknowledged when the worker sent the push that this answers."""


@dataclass(frozen=True, slots=True)
class ServerReplaced:
    """A range has another server, or its server may have lost messages."""

    range: int


WorkerEvent = RowsPulled | UpdateComputed | PushAcknowledged | PushExpected | ServerReplaced


@dataclass(frozen=True, slots=True)
class SendPull:
    """Request the rows of the next minibatch from a range."""

    range: int
    clock: int


@dataclass(frozen=True, slots=True)
class ComputeUpdate:
    """Compute the update of a minibatch from the pulled rows. Minibatch and push have the same number."""

    clock: int


@dataclass(frozen=True, slots=True)
class SendPush:
    """Send a range its part of a stored update."""

    range: int
    clock: int
    acknowledged: int
    """Last push that the range has acknowledged."""


@dataclass(frozen=True, slots=True)
class DropPush:
    """All ranges have acknowledged a push, so its parts are no longer needed."""

    clock: int


WorkerEffect = SendPull | ComputeUpdate | SendPush | DropPush


class SparseWorker:
    """State machine of one worker.

    Args:
        ranges: number of ranges.
        last_clock: number of minibatches of the worker in all passes.
        first_clock: number of pushes that all ranges have from an earlier process.
        window: number of pushes that may be unacknowledged while the worker continues.
        pulls_ahead: whether the rows of the next minibatch are requested before the present minibatch is computed.
            These rows lack the update of the present minibatch, so the bound of staleness must be at least 1.
    """

    def __init__(
        self,
        ranges: int,
        last_clock: int,
        *,
        first_clock: int = 0,
        window: int = 2,
        pulls_ahead: bool = False,
    ) -> None:
        self.clock = first_clock
        """Number of pushes that were computed."""
        self.pull: int | None = None
        """Clock of the pull that is under way, or whose rows are not used yet; None if there is none."""
        self._ranges, self._last, self._window = ranges, last_clock, window
        self._pulls_ahead = pulls_ahead
        self._acknowledged = [first_clock] * ranges
        self._pulled: set[int] = set()
        self._is_computing = False

    def begin(self) -> list[WorkerEffect]:
        """Return the first effects."""
        return list(self._go_on())

    @property
    def is_done(self) -> bool:
        """Whether all ranges have all pushes."""
        return min(self._acknowledged) >= self._last

    def handle(self, event: WorkerEvent) -> list[WorkerEffect]:
        """Process one event, and return the effects to carry out, in order.

        Raises:
            VerificationFailed: a range lacks a push that it had acknowledged.
        """
        match event:
            case RowsPulled():
                return list(self._pull_answered(event))
            case UpdateComputed():
                if not self._is_computing or event.clock != self.clock + 1:
                    return []
                self._is_computing, self.clock = False, event.clock
                sends = [self._send(number, event.clock) for number in range(self._ranges)]
                return [*sends, *self._go_on()]
            case PushAcknowledged():
                return list(self._note(event))
            case PushExpected():
                if event.clock <= event.acknowledged:
                    raise VerificationFailed(
                        f"range {event.range} lost push {event.clock}, which it had acknowledged",
                        hint="report this with the job's events",
                    )
                return list(self._send_from(event.range))
            case ServerReplaced():
                return list(self._send_from(event.range))

    def _pull_answered(self, event: RowsPulled) -> Iterator[WorkerEffect]:
        if event.clock == self.pull and event.range not in self._pulled:
            self._pulled.add(event.range)
            yield from self._go_on()

    def _note(self, event: PushAcknowledged) -> Iterator[WorkerEffect]:
        before = min(self._acknowledged)
        acknowledged = max(self._acknowledged[event.range], min(event.clock, self.clock))
        self._acknowledged[event.range] = acknowledged
        for clock in range(before + 1, min(self._acknowledged) + 1):
            yield DropPush(clock)
        yield from self._go_on()

    def _send(self, number: int, clock: int) -> SendPush:
        return SendPush(number, clock, self._acknowledged[number])

    def _send_from(self, number: int) -> Iterator[WorkerEffect]:
        for clock in range(self._acknowledged[number] + 1, self.clock + 1):
            yield self._send(number, clock)
        if self.pull is not None and number not in self._pulled:
            yield SendPull(number, self.pull)

    def _go_on(self) -> Iterator[WorkerEffect]:
        if self._is_computing or self.clock >= self._last:
            return
        if self.clock - min(self._acknowledged) >= self._window:
            return
        if self.pull is None:
            yield from self._begin_pull(self.clock)
        elif self.pull == self.clock and len(self._pulled) == self._ranges:
            self._is_computing, self.pull = True, None
            if self._pulls_ahead and self.clock + 1 < self._last:
                yield from self._begin_pull(self.clock + 1)
            yield ComputeUpdate(self.clock + 1)

    def _begin_pull(self, clock: int) -> Iterator[SendPull]:
        self.pull, self._pulled = clock, set()
        for number in range(self._ranges):
            yield SendPull(number, clock)
