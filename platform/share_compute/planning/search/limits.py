"""Limits that keep a search within seconds, by the number of machines."""

from __future__ import annotations

from typing import Final, NamedTuple

from share_compute.planning.cost.cost import TrainingCost


class SearchLimits(NamedTuple):
    """Limits of the searches that do not enumerate all orders of machines."""

    width: int
    """Suffixes kept for each first layer and criterion, in an order of machines that is not searched exactly."""
    exact_order: int
    """Maximum product of machines and layers with which an order is searched exactly."""
    orders: int
    """Maximum number of orders that are searched."""
    beam: int
    """Suffixes kept for each first layer, number of machines and criterion, in the beam search over all orders."""
    beam_machines: int
    """Maximum number of machines, the fastest ones, in the beam search over all orders.

    At most `share_compute.planning.search.all_orders.MOST_IN_BEAM`.
    """
    starts: int
    """Number of layouts from which the local search starts."""

    def width_of(self, cost: TrainingCost, machines: int) -> int | None:
        """Return the beam width for an order of ``machines`` machines; None if the order is searched exactly."""
        return None if machines * cost.num_layers <= self.exact_order else self.width


MANY: Final = 64
SOME: Final = 24
LIMITS: Final = {
    SOME: SearchLimits(width=24, exact_order=800, orders=7, beam=100, beam_machines=24, starts=3),
    MANY: SearchLimits(width=24, exact_order=800, orders=7, beam=30, beam_machines=48, starts=3),
}
"""Limits, by the maximum number of machines that they apply to."""
LIMITS_BEYOND: Final = SearchLimits(width=6, exact_order=800, orders=4, beam=6, beam_machines=16, starts=1)
"""Limits for more than `MANY` machines."""


def limits_for(machines: int) -> SearchLimits:
    """Return the limits for a cluster, or an order, of ``machines`` machines."""
    return next((limits for most, limits in LIMITS.items() if machines <= most), LIMITS_BEYOND)
