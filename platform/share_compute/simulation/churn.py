"""Machines that come and go: times between failures and until return, drawn for each machine on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from share_compute.errors import UserError


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

    def trace(self, machines: int, until_s: float, seed: int = 0) -> list[Event]:
        """Return all changes before a time, in order. Every machine is there at the start.

        Args:
            machines: how many.
            until_s: end of the trace.
            seed: draws all times.
        """
        draw = np.random.default_rng([seed, 1])
        now_s = np.zeros(machines)
        changes: list[Event] = []
        is_up = False
        while (now_s < until_s).any():
            now_s = now_s + draw.exponential(self.mean_down_s if is_up else self.mean_up_s, machines)
            within = np.flatnonzero(now_s < until_s)
            changes += [Event(float(now_s[machine]), int(machine), is_up) for machine in within]
            is_up = not is_up
        return sorted(changes)
