"""Reports of dry runs (plans of jobs that were not submitted), and the timeline of a step of a plan."""

from __future__ import annotations

import math
from typing import Literal

from share_compute.files.strict import StrictModel
from share_compute.planning.plan import Bounded, Plan
from share_compute.quantities import listed
from share_compute.topology import Topology


class TimelineCell(StrictModel):
    """One cell of one step (a forward or a backward of one microbatch), as the event simulator scheduled it."""

    stage: int
    member: int
    microbatch: int
    kind: Literal["F", "B"]
    start_s: float
    stop_s: float


class TimelineTransfer(StrictModel):
    """One tensor on its way from a member to a member of the next stage (F) or of the previous one (B)."""

    microbatch: int
    kind: Literal["F", "B"]
    source: tuple[int, int]
    """Sender, as (index of the stage, place of the member in the stage)."""
    target: tuple[int, int]
    """Receiver, as (index of the stage, place of the member in the stage)."""
    start_s: float
    stop_s: float
    """Time of arrival."""


class TimelineUpdate(StrictModel):
    """One member's update of its weights, and its fixed work at the end of the step.

    Before the update, the member waits for the sums of gradients and for messages from the other stages.
    """

    stage: int
    member: int
    start_s: float
    stop_s: float


class PlanTimeline(StrictModel):
    """One step of a plan as the event simulator predicts it, from the timings known now."""

    step_s: float | None = None
    """Predicted time of the step; None if nothing can be predicted: ``problem`` says why."""
    cells: tuple[TimelineCell, ...] = ()
    """Cells of the step; empty if there are too many to display, or if nothing can be predicted.

    A cell's ``stage`` is an index of the plan's stages, and its ``member`` an index of that stage's members."""
    transfers: tuple[TimelineTransfer, ...] = ()
    updates: tuple[TimelineUpdate, ...] = ()
    cell_count: int = 0
    """Number of cells in the whole step, also if they are too many to display; 0 if nothing can be
    predicted."""
    problem: str | None = None


class Alternative(StrictModel):
    """The plan of one strategy for the same job, in figures."""

    strategy: str
    step_s: float | None = None
    """Predicted time of a step; None if there is no plan or nothing can be predicted."""
    samples_per_s: float | None = None
    stages: int = 0
    machines: int = 0
    """Number of machines that hold layers."""
    problem: str | None = None
    """Reason why there is no plan."""


class IslandPlan(StrictModel):
    """One island: machines that train on their own between synchronisations."""

    machines: tuple[str, ...]
    stages: int
    step_s: float
    samples_per_s: float


class IslandProposal(StrictModel):
    """Several islands that would replace lockstep on all machines. Only a prediction: jobs cannot run this way yet."""

    islands: tuple[IslandPlan, ...]
    interval_steps: int
    """Number of steps between synchronisations."""
    synchronisation_s: float
    """Time of one synchronisation."""
    samples_per_s: float
    """Samples per second of all islands together, synchronisation included."""


class ServingPrediction(Bounded):
    """Predicted times of serving a model. The lower bound applies to the time that the objective minimises."""

    objective: Literal["latency", "throughput"]
    plan: Plan
    first_token_s: float
    """TTFT of a request alone."""
    next_token_s: float
    """TPOT of a request alone (objective latency), or with all sequences in flight (objective throughput)."""
    request_s: float
    """Time of a request alone, from its prompt to its last token."""
    tokens_per_s: float
    """Tokens per second with all sequences in flight."""
    within_limits: bool = True
    """Whether the placement keeps the limits on TTFT and TPOT; False if the search found no placement that does."""
    speeds_assumed: bool = False
    """Whether no machine's speed was measured, so that all times are assumptions."""

    @property
    def bounded_s(self) -> float:
        """Time of a request alone (objective latency), or from token to token (objective throughput), in seconds."""
        return self.request_s if self.objective == "latency" else self.next_token_s


class PlanReport(StrictModel):
    """The result of a dry run."""

    plan: Plan
    """The training plan; the serving plan if serving was requested and the machines can only serve the model."""
    timeline: tuple[TimelineCell, ...] = ()
    """Cells of one step; empty if there are too many to display or nothing can be predicted."""
    alternatives: tuple[Alternative, ...] = ()
    """Figures of all installed strategies; empty unless a comparison was requested."""
    islands: IslandProposal | None = None
    serving: ServingPrediction | None = None


def unpredictable(plan: Plan, topology: Topology) -> str | None:
    """Return the reason why no step of a plan can be predicted on these machines; None if a step can be predicted."""
    measured = {machine.id for machine in topology.contributors if 0 < machine.flops_per_s() < math.inf}
    unknown = {
        member.name
        for stage in plan.stages
        for member in stage.members
        if member.microbatches and member.contributor_id not in measured
    }
    return f"the speed of {listed(sorted(unknown))} was not measured" if unknown else None
