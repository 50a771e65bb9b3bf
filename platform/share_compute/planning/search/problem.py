"""The input of a partitioning strategy."""

from __future__ import annotations

from dataclasses import dataclass

from share_compute.planning.cost.cost import TrainingCost


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """One job on one topology, with the required numbers of stages and members.

    Args:
        cost: cost model of the job on the topology.
        stages: required number of stages; None leaves it open.
        members_per_stage: required number of members in each stage; None leaves it open.
    """

    cost: TrainingCost
    stages: int | None = None
    members_per_stage: int | None = None
