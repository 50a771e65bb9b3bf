"""What a search leaves out so that it takes seconds: by the number of machines."""

from __future__ import annotations

from typing import Final, NamedTuple

from share_compute.planning.cost import TrainingCost


class Limits(NamedTuple):
    """How far a search goes where it cannot go through all orders."""

    width: int
    """Suffixes kept for each first layer of an order that is not searched exactly."""
    exact_order: int
    """Most machines times layers of an order that is."""
    orders: int
    """Orders that are searched."""
    beam: int
    """Suffixes kept for each first layer and number of machines, in the search over all orders."""
    beam_machines: int
    """Machines that search looks at: the fastest; at most `share_compute.planning.all_orders.MOST_IN_BEAM`."""
    starts: int
    """Layouts that local moves begin with."""

    def width_of(self, cost: TrainingCost, machines: int) -> int | None:
        """Return the width with which an order of so many machines is searched; None where that is exactly."""
        return None if machines * cost.num_layers <= self.exact_order else self.width


MANY: Final = 64
SOME: Final = 24
LIMITS: Final = {
    SOME: Limits(width=24, exact_order=800, orders=7, beam=100, beam_machines=24, starts=3),
    MANY: Limits(width=24, exact_order=800, orders=7, beam=30, beam_machines=48, starts=3),
}
"""By the most machines that they are for."""
LIMITS_BEYOND: Final = Limits(width=6, exact_order=800, orders=4, beam=6, beam_machines=16, starts=1)
"""For more than `MANY`."""


def limits_for(machines: int) -> Limits:
    """Return the limits for a fleet, or an order, of so many machines."""
    return next((limits for most, limits in LIMITS.items() if machines <= most), LIMITS_BEYOND)
