"""Limits of the search effort, by the number of machines."""

from __future__ import annotations

from typing import Final, NamedTuple

from share_compute.planning.cost.cost import TrainingCost


class SearchLimits(NamedTuple):
    """Limits of the heuristic searches.

    In the fields, a suffix consists of the last stages of a pipeline.
    """

    width: int
    """Beam width in one order of machines: number of suffixes per first layer and criterion (`Labels.best`)."""
    exact_order: int
    """Product of the numbers of machines and layers above which an order of machines is searched with a beam."""
    orders: int
    """Maximum number of orders of machines that are searched before the local search."""
    beam: int
    """Beam width over all orders: number of suffixes per number of machines, first layer and criterion."""
    beam_machines: int
    """Maximum number of machines in the beam search over all orders, at most `all_orders.MOST_IN_BEAM`."""
    starts: int
    """Maximum number of layouts from which the local search starts."""

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
