"""Models of the results of dry runs, and of the timeline of a step."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, computed_field, model_validator

from share_compute.files.strict import StrictModel
from share_compute.planning.plan import Bounded, IdleMachine, Plan
from share_compute.quantities import bytes_text, listed
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


class PolicyFigures(StrictModel):
    """Figures of the job under one policy of synchronization."""

    policy: str
    """Short name of the policy with its main option, such as ``gossip, ring``."""
    compression: str
    """Name of the codec of contributions and updates; ``none`` without one."""
    is_own: bool
    """Whether policy and compression are those of the job."""
    branches: int
    """Number of branches; 1 in lockstep."""
    every: int | None = None
    """Steps that each branch takes in a round; None in lockstep."""
    samples_per_s: float | None = None
    """Samples per second of all branches together; None if there is no plan, or if no machine's speed was measured."""
    sent_bytes_per_step: float | None = None
    """Mean bytes that the busiest machine (lockstep) or each branch (rounds) sends in a step; None without a plan."""
    received_bytes_per_step: float | None = None
    """Mean bytes that the same machine or branch receives in a step."""
    utilisation: float | None = None
    """Mean share of the time in which the machines of the plan compute; None if it was not predicted."""
    gives_up: str
    """One sentence that says what the policy costs in quality or time."""
    problem: str | None = None
    """Reason why there is no plan."""

    @property
    def sample_s(self) -> float | None:
        """Seconds per sample."""
        return 1 / self.samples_per_s if self.samples_per_s else None


class IslandPlan(StrictModel):
    """One island: machines that train without other machines between synchronisations."""

    machines: tuple[str, ...]
    stages: int
    step_s: float
    samples_per_s: float


class IslandProposal(StrictModel):
    """Prediction for training in several islands instead of in lockstep, as ``synchronization: {kind: local}`` does."""

    islands: tuple[IslandPlan, ...]
    interval_steps: int
    """Number of steps between synchronisations."""
    synchronisation_s: float
    """Time of one synchronisation."""
    samples_per_s: float
    """Samples per second of all islands together, synchronisation included."""


class BranchIsland(StrictModel):
    """An island, and the branches that its machines train."""

    machines: tuple[str, ...]
    """Names of the machines."""
    branches: tuple[int, ...]
    step_s: float | None = None
    """Predicted time of one step of one branch that is alone on the island; None if no speed was measured."""
    round_s: float | None = None
    """Predicted time of a round of all its branches, with the exchange with the server."""


class PolicyChoice(StrictModel):
    """Choice between lockstep and rounds, for a job with ``synchronization: {kind: auto}``."""

    every: int | None = Field(ge=1)
    """Steps in a round; None for lockstep."""
    rounds_samples_per_s: float | None = None
    """Predicted samples per second in rounds; None if there is no plan, or no measured speed."""
    lockstep_samples_per_s: float | None = None
    """Predicted samples per second in lockstep; None if there is no plan, or no measured speed."""

    @property
    def sentence(self) -> str:
        """The choice, with the speeds that decided it."""
        chosen = "lockstep"
        if self.every is not None:
            chosen = f"rounds of {self.every:,} {'step' if self.every == 1 else 'steps'}"
        rounds, lockstep = self.rounds_samples_per_s, self.lockstep_samples_per_s
        if rounds is None or lockstep is None:
            missing = "rounds have" if rounds is None else "lockstep has"
            return f"Synchronization auto: {chosen}, because {missing} no plan, or no measured speed."
        return f"Synchronization auto: {chosen}. Rounds would train {rounds:,.3g} samples/s, lockstep {lockstep:,.3g}."


class RoundsPrediction(StrictModel):
    """Predicted figures of a job whose branches merge in rounds."""

    islands: tuple[BranchIsland, ...]
    every: int
    """Steps that each branch takes in a round."""
    contribution_bytes: int
    """Approximate bytes that each branch sends to the server in a round."""
    update_bytes: int
    """Approximate bytes that each branch receives from the server in a round."""
    uncompressed_bytes: int
    """Bytes of a contribution, and of an update, in float32."""
    exchange_s: float | None = None
    """Predicted time of the exchange with the server on the slowest island; None if no link was measured."""
    range_machines: tuple[str, ...] = ()
    """Names of the machines on which ranges of the weights are merged, in order; empty if the server merges all."""
    merge_s: float | None = None
    """Predicted time in which the data of a merge passes the busiest link where it is merged; None if unknown."""
    round_s: float | None = None
    """Predicted time of a round, which is that of the slowest island; None if no machine's speed was measured."""
    samples_per_s: float | None = None
    """Samples per second of all branches together."""
    lockstep_bytes: int
    """Bytes that each branch would send in each step, and receive, if all branches summed float32 gradients in a ring.
    """
    lockstep_samples_per_s: float | None = None
    """Samples per second of one plan for all machines with the batches of all branches; None if there is no plan."""

    @property
    def ratio(self) -> float:
        """Compression ratio: bytes of a contribution and an update in float32, divided by their compressed bytes."""
        return 2 * self.uncompressed_bytes / max(1, self.contribution_bytes + self.update_bytes)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def comparison(self) -> tuple[str, ...]:
        """One sentence that compares the bytes with lockstep training, and one that compares the speed if known."""
        a_step = self.contribution_bytes / self.every
        of_bytes = (
            f"Lockstep AllReduce would send {bytes_text(self.lockstep_bytes)} per branch in each step; rounds send "
            f"{bytes_text(round(a_step))} per step on average{_times(self.lockstep_bytes, a_step, 'less')}."
        )
        found = [of_bytes]
        if self.lockstep_samples_per_s is None:
            found.append("These machines cannot train the job in lockstep with the batches of all branches.")
        elif self.samples_per_s is not None:
            is_faster = self.samples_per_s >= self.lockstep_samples_per_s
            pair = (self.samples_per_s, self.lockstep_samples_per_s)
            large, small = pair if is_faster else pair[::-1]
            found.append(
                f"Lockstep AllReduce on these machines would compute {self.lockstep_samples_per_s:.3g} samples/s; "
                f"rounds compute {self.samples_per_s:.3g}{_times(large, small, 'more' if is_faster else 'less')}."
            )
        return tuple(found)

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_computed(cls, data: Any) -> Any:
        """Drop the computed ``comparison`` from serialised data, so that the data can be read back."""
        return (
            {key: value for key, value in data.items() if key != "comparison"}
            if isinstance(data, dict)
            else data
        )


def _times(large: float, small: float, word: str) -> str:
    """Return the ratio as the end of a sentence; empty if it is below 1.05."""
    factor = large / small if small > 0 else 1.0
    return f", {factor:.3g} times {word}" if factor >= 1.05 else ""


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
    policies: tuple[PolicyFigures, ...] = ()
    """Figures of policies of synchronization; empty unless a comparison was requested, or on one machine."""
    islands: IslandProposal | None = None
    """Proposal of islands for a job that trains in lockstep; None if islands would not be much faster."""
    rounds: RoundsPrediction | None = None
    """Figures of the rounds of a job with branches; None without branches. ``timeline`` is of the first branch then."""
    choice: PolicyChoice | None = None
    """Chosen policy of a job with ``synchronization: {kind: auto}``; the plan and the figures are those of this policy.
    """
    serving: ServingPrediction | None = None

    def with_idle(self, left_out: tuple[IdleMachine, ...]) -> PlanReport:
        """Return the report with ``left_out`` added to the idle machines of its plans."""
        served = self.serving
        return self.model_copy(
            update={
                "plan": self.plan.with_idle(left_out),
                "serving": served and served.model_copy(update={"plan": served.plan.with_idle(left_out)}),
            }
        )


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
