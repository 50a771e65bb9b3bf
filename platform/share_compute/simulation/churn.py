"""Machines that come and go: times between failures and until return, drawn for each machine on its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from share_compute.errors import UserError

MOST_EVENTS = 5_000_000
"""Changes that a simulation takes; some minutes."""


class Event(NamedTuple):
    """One machine goes or comes back. Sorts by time, then by machine."""

    time_s: float
    machine: int
    """Its index in the topology."""
    is_up: bool
    """Whether it is there from now on."""


@dataclass(frozen=True, slots=True)
class Churn:
    """How often machines go, and how soon they are back; both times are exponential."""

    mean_up_s: float
    """Mean time between failures of one machine."""
    mean_down_s: float
    """Mean time until it returns."""

    def __post_init__(self) -> None:
        if not (0 < self.mean_up_s < float("inf") and 0 < self.mean_down_s < float("inf")):
            raise UserError(
                "the mean times between failures and until return must be more than 0 and finite",
                mend="give them as 30m, 4h or 2d; leave --mtbf out for machines that never fail",
            )

    @property
    def availability(self) -> float:
        """Share of the time that a machine is there, in the long run."""
        return self.mean_up_s / (self.mean_up_s + self.mean_down_s)

    def trace(self, machines: int, until_s: float, seed: int = 0) -> Iterator[Event]:
        """Yield all changes before a time, in order. Every machine is there at the start.

        Args:
            machines: how many.
            until_s: end of the trace.
            seed: draws all times.

        Raises:
            UserError: at once, where more than `MOST_EVENTS` are to be expected.
        """
        expected = 2 * machines * until_s / (self.mean_up_s + self.mean_down_s)
        if expected > MOST_EVENTS:
            raise UserError(
                f"the machines would go and come back about {expected:.2g} times; a simulation takes {MOST_EVENTS:,}",
                mend="simulate fewer hours or machines, or a longer time between failures",
            )
        return self._events(machines, until_s, np.random.default_rng([seed, 1]))

    def _events(self, machines: int, until_s: float, draw: np.random.Generator) -> Iterator[Event]:
        # One next event of each machine: what comes later is not drawn yet, and takes no memory.
        first = draw.exponential(self.mean_up_s, machines)
        coming = [Event(float(time_s), machine, is_up=False) for machine, time_s in enumerate(first)]
        heapify(coming)
        while coming and coming[0].time_s < until_s:
            event = coming[0]
            yield event
            lasts_s = draw.exponential(self.mean_down_s if not event.is_up else self.mean_up_s)
            heapreplace(coming, Event(event.time_s + lasts_s, event.machine, not event.is_up))
