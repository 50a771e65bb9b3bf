"""Machines that leave and return after random times, which are drawn independently for each machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from share_compute.errors import UserError

MOST_EVENTS = 5_000_000
"""Maximum expected number of events (a machine leaves or returns) in a simulation, to limit its run time."""


class ChurnEvent(NamedTuple):
    """One machine leaves or returns. Events sort by time, then by machine."""

    time_s: float
    machine: int
    """Index of the machine in the topology."""
    is_up: bool
    """True if the machine returns, False if it leaves."""


@dataclass(frozen=True, slots=True)
class Churn:
    """Exponential distributions of two times: until a present machine fails, and until a failed machine returns.

    Raises:
        UserError: a mean time is not positive and finite.
    """

    mean_up_s: float
    """Mean time for which a machine is present before it fails, in seconds."""
    mean_down_s: float
    """Mean time until a failed machine returns, in seconds."""

    def __post_init__(self) -> None:
        if not (0 < self.mean_up_s < float("inf") and 0 < self.mean_down_s < float("inf")):
            raise UserError(
                "the mean times between failures and until return must be more than 0 and finite",
                hint="give them as 30m, 4h or 2d; leave --mtbf out for machines that never fail",
            )

    def trace(self, machines: int, until_s: float, seed: int = 0) -> Iterator[ChurnEvent]:
        """Return an iterator over all events before ``until_s``, in order. Every machine is present at the start.

        Args:
            machines: number of machines.
            until_s: end of the trace, in seconds.
            seed: seed of the random times.

        Raises:
            UserError: more than `MOST_EVENTS` are expected; raised by the call, before any event.
        """
        expected = 2 * machines * until_s / (self.mean_up_s + self.mean_down_s)
        if expected > MOST_EVENTS:
            raise UserError(
                f"the machines would leave and return about {expected:.2g} times; a simulation takes {MOST_EVENTS:,}",
                hint="simulate fewer hours or machines, or a longer time between failures",
            )
        return self._events(machines, until_s, np.random.default_rng([seed, 1]))

    def _events(self, machines: int, until_s: float, draw: np.random.Generator) -> Iterator[ChurnEvent]:
        # Only the next event of each machine is drawn, so that later events take no memory.
        first = draw.exponential(self.mean_up_s, machines)
        coming = [ChurnEvent(float(time_s), machine, is_up=False) for machine, time_s in enumerate(first)]
        heapify(coming)
        while coming and coming[0].time_s < until_s:
            event = coming[0]
            yield event
            lasts_s = draw.exponential(self.mean_down_s if not event.is_up else self.mean_up_s)
            heapreplace(coming, ChurnEvent(event.time_s + lasts_s, event.machine, not event.is_up))
