"""A plan: the ordered pools of one job at one epoch, and `make_plan`, the seam where the full planner goes."""

from __future__ import annotations

from share_compute.errors import PlanInfeasible
from share_compute.planning.partitioning import load_strategy, map_partitions_to_shards
from share_compute.planning.profile import ModelProfile
from share_compute.specification import TrainJob
from share_compute.strict import StrictModel
from share_compute.topology import Contributor, Topology


class MemberPlan(StrictModel):
    """One contributor in a pool."""

    contributor_id: str
    name: str
    microbatches: tuple[int, ...]
    """Ids of the microbatches it computes in each step."""
    memory_bytes: int
    """Predicted need: weights, gradients, optimizer state and activations in flight."""
    reason: str
    """Why it holds what it holds, in one sentence."""


class PoolPlan(StrictModel):
    """One shard and the members that each hold all of it."""

    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    parameters: int
    members: tuple[MemberPlan, ...]


class Plan(StrictModel):
    """The ordered pools of one job, at one epoch."""

    epoch: int
    strategy: str
    num_layers: int
    parameters: int
    pools: tuple[PoolPlan, ...]
    idle: tuple[str, ...] = ()
    """Names of contributors that got nothing."""
