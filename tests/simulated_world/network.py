"""Simulated time, and messages that are late, duplicated, lost or out of order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random

from share_compute.protocol.failures import FailureKind, InjectedFailure

Action = Callable[[], None]
MISSED_S = 2.0
"""Time in seconds after which the receiver of a lost tensor knows that it lacks one."""
NOT_OVERTAKEN_S = 8.0
"""Time in seconds after which a message that was to be overtaken is delivered anyway."""


class Clock:
    """Runs actions in the order of their time, and actions of one time in the order in which they were requested."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._actions: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def after(self, delay_s: float, action: Action) -> None:
        """Run an action after ``delay_s`` seconds."""
        heappush(self._actions, (self.now_s + delay_s, next(self._numbers), action))

    def advance(self) -> bool:
        """Run the next action, and return whether there was one."""
        if not self._actions:
            return False
        self.now_s, _, action = heappop(self._actions)
        action()
        return True


@dataclass(frozen=True, slots=True)
class Weather:
    """Rates of random network failures, up to a given time.

    Args:
        delay_s: longest regular delay of a message, in seconds; delays are drawn evenly from 0 to this.
        late: share of messages with an extra delay of up to ten times ``delay_s``.
        doubled: share of messages that arrive twice.
        lost: share of messages that never arrive.
        until_s: time at which all failures end; later messages take ``delay_s`` at most.
    """

    delay_s: float = 0.3
    late: float = 0.0
    doubled: float = 0.0
    lost: float = 0.0
    until_s: float = 0.0


class Network:
    """Carries messages between named processes.

    Args:
        clock: source of the simulated time.
        weather: rates of failures that no script asks for.
        random: generator for these failures.
    """

    def __init__(self, clock: Clock, weather: Weather, random: Random) -> None:
        self.messages = 0
        """Number of messages sent so far."""
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
        failures: Collection[InjectedFailure] = (),
        missed: Action | None = None,
    ) -> None:
        """Run an action at the target when the message arrives, if it does.

        A message with a flipped bit does not match its checksum, so its receiver drops it.

        Args:
            source: name of the sender.
            target: name of the receiver.
            action: action at the target.
            failures: failures that happen to the message.
            missed: action at the target if the message is lost, unless the two processes are cut off from each other.
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
        """Cut a process off from its peers, or from everybody if none is named, for ``duration_s`` seconds."""
        self._cuts.append((self._clock.now_s + duration_s, process, frozenset(peers)))

    def is_cut(self, source: str, target: str) -> bool:
        """Return whether messages between two processes are lost now."""
        return any(
            self._clock.now_s < until_s
            and process in (source, target)
            and (not peers or source in peers or target in peers)
            for until_s, process, peers in self._cuts
        )
