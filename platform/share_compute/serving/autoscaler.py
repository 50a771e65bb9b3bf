"""How many replicas a deployment is to have: as many as what is asked of it needs, within its range.

A state machine without a clock: it is told the time. Needed are as many replicas as give each at most
``target_ongoing_requests`` sequences, running and queued. Since all sequences are counted, and not what each replica
has, replicas that still load are not asked for again.

It goes up by what was needed at least during the whole of ``upscale_delay_s``, down by what was needed at most during
the whole of ``downscale_delay_s``: a peak or a lull that is shorter changes nothing. Those that are left must have some
room to spare, so a load that wavers about the point where one more is needed changes nothing either. From none to one
it goes with the first sequence, from one to none when nobody asked for ``downscale_to_zero_delay_s``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from share_compute.specification import ReplicasSpec

_FILLED = 0.8
"""Replicas that are left have at most so much of what they are to have."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a deployment at one moment."""

    ongoing: tuple[int, ...] = ()
    """Sequences, running and queued, of each replica that is up."""
    waiting: int = 0
    """Sequences that no replica has."""
    idle_s: float | None = None
    """So long there was no sequence, but a replica that would have taken one; None where that is not so."""

    @property
    def sequences(self) -> int:
        """All of them."""
        return sum(self.ongoing) + self.waiting


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas there are to be."""

    wanted: int
    reason: str
    """Why it is not what it was before."""


class _Lasting:
    """What was needed ever since it differed: the least of it, or the most."""

    def __init__(self, mildest: Callable[[int, int], int]) -> None:
        self._mildest = mildest
        self._since_s: float | None = None
        self._needed = 0

    def see(self, needed: int | None, now_s: float) -> None:
        """Take note of what is needed; None where nothing else is than there is."""
        if needed is None:
            self._since_s = None
        elif self._since_s is None:
            self._since_s, self._needed = now_s, needed
        else:
            self._needed = self._mildest(self._needed, needed)

    def after(self, delay_s: float, now_s: float) -> int | None:
        """Return what was needed for so long; None where that was not so long."""
        if self._since_s is None or now_s - self._since_s < delay_s:
            return None
        return self._needed


class Autoscaler:
    """Follows what is asked of one deployment.

    Args:
        limits: the range, and how to follow.
        concurrent: most sequences that a replica runs at one time: its target, where the limits have none.
        wanted: replicas to begin with; brought into the range.
    """

    def __init__(self, limits: ReplicasSpec, concurrent: int, wanted: int) -> None:
        self._concurrent = concurrent
        self.limits = limits
        self.wanted = _within(limits, wanted)
        """Replicas that there are to be."""
        self._forget()

    def _forget(self) -> None:
        self._more, self._fewer = _Lasting(min), _Lasting(max)

    @property
    def _target(self) -> float:
        return self.limits.target_ongoing_requests or self._concurrent

    def limit(self, limits: ReplicasSpec) -> Decision | None:
        """Take another range; returns the change that it makes at once, if it does."""
        self.limits = limits
        self._forget()
        return self._become(_within(limits, self.wanted), f"{limits} were asked for")

    def decide(self, demand: Demand, now_s: float) -> Decision | None:
        """Return the change that is due, if one is.

        Args:
            demand: what is asked.
            now_s: the time; never goes back.
        """
        limits, sequences = self.limits, demand.sequences
        if not self.wanted:
            wanted = self._needed(sequences) if sequences else 0
            return self._become(wanted, f"{_sequences(sequences)} came while none was up")
        idle_s = demand.idle_s if not limits.min and not sequences else None
        if idle_s is not None and idle_s >= limits.downscale_to_zero_delay_s:
            return self._become(0, f"nobody asked for {limits.downscale_to_zero_delay_s:g} s")
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
        """Return the replicas that so many sequences need, where there is to be at least one."""
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
