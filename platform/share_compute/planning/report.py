"""A plan on paper: what people see before they submit, with all strategies side by side when they want."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from share_compute.planning.plan import Bounded, Plan
from share_compute.planning.words import listed
from share_compute.planning.workload import ServingWorkload
from share_compute.specification import TrainJob
from share_compute.strict import StrictModel
from share_compute.topology import Topology

if TYPE_CHECKING:
    from share_compute.planning.profile import ModelProfile
    from share_compute.planning.timings import MachineTimings


class TimelineCell(StrictModel):
    """One cell of one step, as the event simulator of the schedule laid it."""

    pool: int
    member: int
    microbatch: int
    kind: Literal["F", "B"]
    start_s: float
    stop_s: float


class TimelineTransfer(StrictModel):
    """One tensor on its way from a member to a member of the next pool (F) or of the one before (B)."""

    microbatch: int
    kind: Literal["F", "B"]
    source: tuple[int, int]
    """Pool, and place in it."""
    target: tuple[int, int]
    start_s: float
    stop_s: float
    """It is there."""


class TimelineUpdate(StrictModel):
    """When one member updates its weights; before that it waits for sums of gradients and for word of other pools."""

    pool: int
    member: int
    start_s: float
    stop_s: float


class PlanTimeline(StrictModel):
    """One step of a plan as the event simulator of the schedule lays it: predicted, with times that are known now."""

    step_s: float | None = None
    """None where nothing can be predicted; ``problem`` says why."""
    cells: tuple[TimelineCell, ...] = ()
    """Pools and members are places in the plan; empty when there are too many cells to look at."""
    transfers: tuple[TimelineTransfer, ...] = ()
    updates: tuple[TimelineUpdate, ...] = ()
    cell_count: int = 0
    """Of the whole step, looked at or not."""
    problem: str | None = None


class Alternative(StrictModel):
    """What another strategy would have made of the same job."""

    strategy: str
    step_s: float | None = None
    """Predicted; None when it finds no plan."""
    samples_per_s: float | None = None
    pools: int = 0
    machines: int = 0
    """Machines that hold something."""
    problem: str | None = None
    """Why there is no plan."""


class IslandPlan(StrictModel):
    """One island that trains on its own between synchronisations."""

    machines: tuple[str, ...]
    pools: int
    step_s: float
    samples_per_s: float


class IslandProposal(StrictModel):
    """Several islands in place of one lockstep over all machines. Not run yet: it tells what it would bring."""

    islands: tuple[IslandPlan, ...]
    interval_steps: int
    """Steps between synchronisations."""
    synchronisation_s: float
    """Time of one synchronisation."""
    samples_per_s: float
    """Of all islands together, synchronisation included."""


class ServingPrediction(Bounded):
    """What the same machines would do for requests. The bound is on what the objective makes small."""

    objective: Literal["latency", "throughput"]
    plan: Plan
    first_token_s: float
    """TTFT of one prompt."""
    next_token_s: float
    """TPOT: of a request alone for objective latency, with all sequences in flight for throughput."""
    request_s: float
    """From prompt to last token of a request alone."""
    tokens_per_s: float
    """With all sequences in flight."""
    within_limits: bool = True
    """Whether it keeps the limits on first and next token; if not, no placement that was found does."""
    speeds_assumed: bool = False
    """Whether no machine's speed was measured, so that all times are assumptions."""

    @property
    def bounded_s(self) -> float:
        """The time of a request alone for objective latency, from token to token for throughput."""
        return self.request_s if self.objective == "latency" else self.next_token_s


class PlanReport(StrictModel):
    """All that a dry run tells."""

    plan: Plan
    """Of training; where the machines can only serve the model, and that was asked for, the one of serving."""
    timeline: tuple[TimelineCell, ...] = ()
    """One step; empty when it has too many cells to look at."""
    alternatives: tuple[Alternative, ...] = ()
    """Other strategies, when a comparison was asked for."""
    islands: IslandProposal | None = None
    serving: ServingPrediction | None = None


def dry_run(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    *,
    strategy: str | None = None,
    compare: bool = False,
    serving: ServingWorkload | None = None,
) -> PlanReport:
    """Plan a job on paper.

    Args:
        spec: the job.
        topology: the machines, real or imagined.
        profile: what its model costs.
        strategy: in place of the job's own.
        compare: tell what every installed strategy would have made of it.
        serving: tell, too, what the machines would do for requests.

    Raises:
        PlanInfeasible: the machines cannot hold it, for requests when ``serving`` asks for that; ``details`` says
            what is missing, and what would make it fit.
        UserError: the model has nothing to train, or there is no such strategy.
    """
    # Imported here, so that those who only read reports need no numpy.
    from share_compute.planning.paper import report  # noqa: PLC0415

    return report(spec, topology, profile, strategy=strategy, compare=compare, serving=serving)


def unpredictable(plan: Plan, topology: Topology) -> str | None:
    """Return why nothing can be predicted of a plan on these machines; None when it can."""
    measured = {machine.id for machine in topology.contributors if 0 < machine.flops_per_s() < math.inf}
    unknown = {
        member.name
        for pool in plan.pools
        for member in pool.members
        if member.microbatches and member.contributor_id not in measured
    }
    return f"the speed of {listed(sorted(unknown))} was not measured" if unknown else None


def lay_out(
    spec: TrainJob,
    plan: Plan,
    topology: Topology,
    profile: ModelProfile,
    timings: Mapping[str, MachineTimings],
) -> PlanTimeline:
    """Lay out one step of a plan that was made before.

    Args:
        spec: the job.
        plan: who holds what.
        topology: the machines of the plan, maybe among others.
        profile: what its model costs.
        timings: what was timed of the job's layers; what does not hold any more is left out.
    """
    from share_compute.planning.paper import timeline_of  # noqa: PLC0415

    return timeline_of(spec, plan, topology, profile, timings)
