"""Autoscaling: compute the number of replicas that a deployment needs for its load, within its range.

The goal is at most ``target_ongoing_requests`` sequences on each replica, running and queued.

- Scaling up needs more load for ``upscale_delay_s``. The new number is the minimum that was needed in this time.
- Scaling down needs less load for ``downscale_delay_s``. The new number is the maximum that was needed in this time.
- Scaling down leaves spare capacity (`_FILLED`), so that the number of replicas does not oscillate.
- Scaling up from 0 has no delay.
- Scaling to 0 needs a range that includes 0, and no sequence for ``downscale_to_zero_delay_s``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from share_compute.specification import ReplicasSpec

_FILLED = 0.8
"""Maximum fraction of its target load that a replica has after scaling down."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The load of a deployment at one moment."""

    ongoing: tuple[int, ...] = ()
    """Number of sequences, running and queued, of each replica."""
    waiting: int = 0
    """Number of sequences that no replica has taken."""
    idle_s: float | None = None
    """Seconds without a sequence; None while there are sequences, or while no replica is ready."""

    @property
    def sequences(self) -> int:
        """Total number of sequences, on replicas and waiting for one."""
        return sum(self.ongoing) + self.waiting


@dataclass(frozen=True, slots=True)
class Decision:
    """A change in the number of replicas, with its reason."""

    wanted: int
    """New number of replicas."""
    reason: str


class _Lasting:
    """Tracks the numbers of replicas needed since scaling in one direction became necessary.

    It keeps their minimum for scaling up, and their maximum for scaling down.
    """

    def __init__(self, mildest: Callable[[int, int], int]) -> None:
        self._mildest = mildest
        self._since_s: float | None = None
        self._needed = 0

    def see(self, needed: int | None, now_s: float) -> None:
        """Record the number of replicas needed now.

        Args:
            needed: the number; None if no change in this direction is needed.
            now_s: current time in seconds.
        """
        if needed is None:
            self._since_s = None
        elif self._since_s is None:
            self._since_s, self._needed = now_s, needed
        else:
            self._needed = self._mildest(self._needed, needed)

    def after(self, delay_s: float, now_s: float) -> int | None:
        """Return the new number of replicas; None if a change has not been needed for ``delay_s`` yet."""
        if self._since_s is None or now_s - self._since_s < delay_s:
            return None
        return self._needed


class Autoscaler:
    """State machine that scales one deployment with its load.

    Args:
        limits: range, target and delays.
        concurrent: maximum number of sequences that a replica runs at a time. It is the target load if ``limits`` sets
            no target.
        wanted: initial number of replicas, clamped to the range.
    """

    def __init__(self, limits: ReplicasSpec, concurrent: int, wanted: int) -> None:
        self._concurrent = concurrent
        self.limits = limits
        self.wanted = _within(limits, wanted)
        """Number of replicas that the deployment should have."""
        self._forget()

    def _forget(self) -> None:
        self._more, self._fewer = _Lasting(min), _Lasting(max)

    @property
    def _target(self) -> float:
        return self.limits.target_ongoing_requests or self._concurrent

    def limit(self, limits: ReplicasSpec) -> Decision | None:
        """Replace the limits and clamp the number of replicas to them; return the change, or None if there is none."""
        self.limits = limits
        self._forget()
        return self._become(_within(limits, self.wanted), f"{limits} were asked for")

    def decide(self, demand: Demand, now_s: float) -> Decision | None:
        """Record the load, and change the number of replicas if necessary; return the change, or None if there is none.

        Args:
            demand: current load.
            now_s: current time in seconds; never decreases.
        """
        limits, sequences = self.limits, demand.sequences
        if not self.wanted:
            wanted = self._needed(sequences) if sequences else 0
            return self._become(wanted, f"{_sequences(sequences)} came while none was up")
        idle_s = demand.idle_s if not limits.min and not sequences else None
        if idle_s is not None and idle_s >= limits.downscale_to_zero_delay_s:
            return self._become(0, f"no request for {limits.downscale_to_zero_delay_s:g} s")
        up, down = self._needed(sequences), self._needed(sequences, _FILLED)
        self._more.see(up if up > self.wanted else None, now_s)
        self._fewer.see(down if down < self.wanted else None, now_s)
        if (more := self._more.after(limits.upscale_delay_s, now_s)) is not None:
            what = f"{_sequences(sequences)}, {demand.waiting} of them with no replica"
            return self._become(more, f"{what if demand.waiting else _sequences(sequences)}: {self._each}")
        if (fewer := self._fewer.after(limits.downscale_delay_s, now_s)) is not None:
            lasted = f"for {limits.downscale_delay_s:g} s {fewer} sufficed"
            return self._become(fewer, f"{lasted}: {self._each}")
        return None

    @property
    def _each(self) -> str:
        return f"each replica is to have {self._target:g}"

    def _needed(self, sequences: int, filled: float = 1.0) -> int:
        """Return the number of replicas at which each has at most ``filled`` times its target load.

        The number is clamped to the range, and is at least 1.
        """
        return max(1, _within(self.limits, ceil(sequences / (filled * self._target))))

    def _become(self, wanted: int, reason: str) -> Decision | None:
        if wanted == self.wanted:
            return None
        self.wanted = wanted
        self._forget()
        return Decision(wanted, reason)


def _within(limits: ReplicasSpec, wanted: int) -> int:
    return min(max(wanted, limits.min), limits.max)


def _sequences(number: int) -> str:
    return f"{number} sequence{'s' if number != 1 else ''}"
