"""What a strategy is asked: one job's layers, on these machines, so that a step is short."""

from __future__ import annotations

from dataclasses import dataclass

from share_compute.planning.cost import TrainingCost


@dataclass(frozen=True, slots=True)
class Problem:
    """One job on one topology, with what the submitter insists on.

    Args:
        cost: model, machines, links and batches, as times and bytes.
        pools: exactly so many, when that was asked for.
        members_per_pool: exactly so many in each, when that was asked for.
    """

    cost: TrainingCost
    pools: int | None = None
    members_per_pool: int | None = None
