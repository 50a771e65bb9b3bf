"""Time, and messages that are late, doubled, lost or out of order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random

from share_compute.protocol.failures import Failure, FailureKind

Action = Callable[[], None]
MISSED_S = 2.0
"""After this time the receiver of a tensor that was lost knows that it lacks one."""
NOT_OVERTAKEN_S = 8.0
"""After this time a message that was to be overtaken goes on anyway."""


class Clock:
    """Runs actions in the order of their time; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._actions: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def after(self, delay_s: float, action: Action) -> None:
        """Run an action later."""
        heappush(self._actions, (self.now_s + delay_s, next(self._numbers), action))

    def advance(self) -> bool:
        """Run the next action; returns whether there was one."""
        if not self._actions:
            return False
        self.now_s, _, action = heappop(self._actions)
        action()
        return True


@dataclass(frozen=True, slots=True)
class Weather:
    """How badly the network behaves, until it gets better.

    Args:
        delay_s: mean time that a message takes.
        late: share of messages that take ten times as long.
        doubled: share that arrives twice.
        lost: share that never arrives.
        until_s: when all that ends; then messages take ``delay_s`` at most.
    """

    delay_s: float = 0.3
    late: float = 0.0
    doubled: float = 0.0
    lost: float = 0.0
    until_s: float = 0.0


class Network:
    """Carries messages between named processes.

    Args:
        clock: gives the time.
        weather: how often messages go wrong without a script.
        random: draws it.
    """

    def __init__(self, clock: Clock, weather: Weather, random: Random) -> None:
        self.messages = 0
        """Sent so far."""
        self._clock = clock
        self._weather = weather
        self._random = random
        self._held: dict[tuple[str, str], Action] = {}
        self._cuts: list[tuple[float, str, frozenset[str]]] = []

    def send(
        self,
        source: str,
        target: str,
        action: Action,
        failures: Collection[Failure] = (),
        missed: Action | None = None,
    ) -> None:
        """Run an action at the target when the message arrives, if it does.

        What arrives with a flipped bit has another checksum than it says, so its receiver drops it.

        Args:
            source: who sends it.
            target: who gets it.
            action: what happens there.
            failures: what goes wrong with it.
            missed: what happens there when it is lost, unless nothing gets through at all.
        """
        self.messages += 1
        kinds = {failure.kind: failure for failure in failures}
        if self.is_cut(source, target):
            return
        if kinds.keys() & {FailureKind.drop, FailureKind.corrupt}:
            self._lose(missed)
            return
        if FailureKind.reorder in kinds:
            self._held[source, target] = action
            self._clock.after(NOT_OVERTAKEN_S, lambda: self._release(source, target, action))
            return
        delay_s = kinds[FailureKind.delay].duration_s if FailureKind.delay in kinds else 0.0
        copies = 2 if FailureKind.duplicate in kinds else 1
        self._carry(action, delay_s, copies, missed)
        if (source, target) in self._held:
            overtaken = self._held.pop((source, target))
            self._clock.after(delay_s + 11 * self._weather.delay_s, overtaken)

    def _lose(self, missed: Action | None) -> None:
        if missed is not None:
            self._clock.after(MISSED_S, missed)

    def _carry(self, action: Action, delay_s: float, copies: int, missed: Action | None) -> None:
        weather, random = self._weather, self._random
        if self._clock.now_s < weather.until_s:
            if random.random() < weather.lost:
                self._lose(missed)
                return
            if random.random() < weather.doubled:
                copies += 1
            if random.random() < weather.late:
                delay_s += 10 * weather.delay_s * random.random()
        for _ in range(copies):
            self._clock.after(delay_s + weather.delay_s * random.random(), action)

    def _release(self, source: str, target: str, action: Action) -> None:
        if self._held.get((source, target)) is action:
            del self._held[source, target]
            action()

    def cut(self, process: str, peers: Collection[str], duration_s: float) -> None:
        """Let a process and its peers (none named: everybody) not reach each other for a while."""
        self._cuts.append((self._clock.now_s + duration_s, process, frozenset(peers)))

    def is_cut(self, source: str, target: str) -> bool:
        """Return whether messages between two processes are lost now."""
        return any(
            self._clock.now_s < until_s
            and process in (source, target)
            and (not peers or source in peers or target in peers)
            for until_s, process, peers in self._cuts
        )
