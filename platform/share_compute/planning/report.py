"""Models of the results of dry runs, and of the timeline of a step."""

from __future__ import annotations

import math
from typing import Literal

from share_compute.files.strict import StrictModel
from share_compute.planning.plan import Bounded, Plan
from share_compute.quantities import listed
from share_compute.topology import Topology


class TimelineCell(StrictModel):
    """One simulated cell of a step: a forward or a backward of one microbatch on one member."""

    stage: int
    member: int
    microbatch: int
    kind: Literal["F", "B"]
    start_s: float
    stop_s: float


class TimelineTransfer(StrictModel):
    """One simulated transfer of a tensor, to a member of the next stage (F) or of the previous stage (B)."""

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
    """One member's update of its weights, and its fixed work at the end of the step."""

    stage: int
    member: int
    start_s: float
    stop_s: float


class PlanTimeline(StrictModel):
    """One simulated step of a plan."""

    step_s: float | None = None
    """Predicted time of the step; None if it cannot be predicted, for the reason in ``problem``."""
    cells: tuple[TimelineCell, ...] = ()
    """Cells of the step; empty if there are too many to display, or if the step cannot be predicted.

    ``stage`` of a cell is an index into the plan's stages, and ``member`` is an index into that stage's members."""
    transfers: tuple[TimelineTransfer, ...] = ()
    updates: tuple[TimelineUpdate, ...] = ()
    cell_count: int = 0
    """Number of cells in the whole step, even if ``cells`` is empty; 0 if the step cannot be predicted."""
    problem: str | None = None


class Alternative(StrictModel):
    """Figures of the plan that one strategy makes for the job."""

    strategy: str
    step_s: float | None = None
    """Predicted time of a step; None if there is no plan, or if the plan has no prediction."""
    samples_per_s: float | None = None
    stages: int = 0
    machines: int = 0
    """Number of machines that hold layers."""
    problem: str | None = None
    """Reason why there is no plan."""


class IslandPlan(StrictModel):
    """One island: machines that train without other machines between synchronisations."""

    machines: tuple[str, ...]
    stages: int
    step_s: float
    samples_per_s: float


class IslandProposal(StrictModel):
    """Prediction for training in several islands instead of in lockstep. Jobs cannot run this way yet."""

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
    """Time to first token (TTFT) of a request alone."""
    next_token_s: float
    """Time per output token (TPOT).

    Objective latency: of a request alone. Objective throughput: with all sequences in flight.
    """
    request_s: float
    """Time of a request alone, from its prompt to its last token."""
    tokens_per_s: float
    """Tokens per second with all sequences in flight."""
    within_limits: bool = True
    """Whether the plan keeps the limits on TTFT and TPOT; always true for objective latency."""
    speeds_assumed: bool = False
    """Whether no machine's speed was measured, so that all times are assumptions."""

    @property
    def bounded_s(self) -> float:
        """Time of a request alone (objective latency), or per output token (objective throughput), in seconds."""
        return self.request_s if self.objective == "latency" else self.next_token_s


class PlanReport(StrictModel):
    """The result of a dry run."""

    plan: Plan
    """The training plan; the serving plan if serving was requested and the machines can only serve the model."""
    timeline: tuple[TimelineCell, ...] = ()
    """Cells of one step; empty if there are too many to display, or if the plan has no prediction."""
    alternatives: tuple[Alternative, ...] = ()
    """Figures of all installed strategies; empty unless a comparison was requested."""
    islands: IslandProposal | None = None
    serving: ServingPrediction | None = None


def unpredictable(plan: Plan, topology: Topology) -> str | None:
    """Return a message that names the computing members whose speed was not measured; None if there are none."""
    measured = {machine.id for machine in topology.contributors if 0 < machine.flops_per_s() < math.inf}
    unknown = {
        member.name
        for stage in plan.stages
        for member in stage.members
        if member.microbatches and member.contributor_id not in measured
    }
    return f"the speed of {listed(sorted(unknown))} was not measured" if unknown else None
