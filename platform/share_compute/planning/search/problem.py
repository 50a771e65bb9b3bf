"""The input of a strategy: place one job's layers on machines so that a step is short."""

from __future__ import annotations

from dataclasses import dataclass

from share_compute.planning.cost.cost import TrainingCost


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """One job on one topology, with the numbers of stages and members that the submitter requires.

    Args:
        cost: cost model of the job on the topology.
        stages: required number of stages; None leaves it open.
        members_per_stage: required number of members in each stage; None leaves it open.
    """

    cost: TrainingCost
    stages: int | None = None
    members_per_stage: int | None = None
