"""Status of a replica of a deployment, as the replica's server reports it to the control plane in JSON."""

from __future__ import annotations

from typing import Any

from share_compute.files.strict import StrictModel
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.planning.report import ServingPrediction


class StageStatus(StrictModel):
    """One stage of a replica, and the member that holds the stage."""

    contributor_id: str
    name: str
    """Name of the member's machine."""
    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    is_alive: bool
    """Whether a heartbeat arrived recently."""
    busy_fraction: float | None = None
    """Fraction of the last seconds in which the member computed, 0 to 1; None before it was measured."""
    predicted_busy_fraction: float | None = None
    """Predicted fraction of the time in which the member computes, with all sequences in flight; None if unknown."""
    process_id: int | None = None
    """Process id of the member."""
    resident_bytes: int = 0
    """Resident memory (RSS) of the member's process."""
    cache_bytes: int = 0
    """Memory of the KV slots of this stage; on a GPU, ``resident_bytes`` does not include this memory."""


class LatencyStatus(StrictModel):
    """Measured and predicted latency, in seconds; None where unknown."""

    p50_s: float | None = None
    p95_s: float | None = None
    predicted_s: float | None = None
    """Latency that the plan predicts."""


class QueueStatus(StrictModel):
    """Sequences of a replica's scheduler, and their use of KV capacity."""

    queued: int = 0
    """Waiting sequences, including sequences that were interrupted by a membership change or a lack of KV capacity."""
    running: int = 0
    batch_size: float | None = None
    """Mean number of sequences in the last engine steps; None before there were any."""
    steps_in_flight: int = 0
    kv_tokens: int = 0
    """KV capacity of all slots together, in tokens; 0 for an encoder."""
    kv_tokens_used: int = 0
    """KV capacity reserved for running sequences, in tokens."""
    kv_tokens_cached: int = 0
    """KV capacity in slots of ended sequences, in tokens; kept for later sequences with the same first tokens."""
    prefix_hits: int = 0
    """Number of KV slots that started with a copy of another slot's first tokens."""
    emitted_tokens: int = 0
    wasted_tokens: int = 0
    """Tokens sampled after the end of their sequence, in engine steps sent before the end was known."""
    preempted: int = 0
    """Number of times that a sequence gave up its full KV slot, because there was no KV capacity for a larger one."""


class Interruption(StrictModel):
    """A time in which a replica could not answer, for example because a member was lost. Requests waited."""

    number: int
    """Sequence number of the interruption, from 1, counted by the replica's server."""
    reason: str
    """Cause, in a few words."""
    machines: tuple[str, ...] = ()
    """Names of the machines that were lost; empty if the cause was another one."""
    ago_s: float
    """Seconds since the interruption was noticed."""
    seconds: float | None = None
    """Duration until the stages were formed again; None while it lasts."""


class ServingStatus(StrictModel):
    """One replica of a deployment at one moment."""

    state: DeploymentState
    reason: str
    """Reason for the state, in one sentence."""
    is_reading_model: bool = False
    """Whether the replica still reads its model, so that the machines it needs are unknown."""
    epoch: int = 0
    """Epoch of the present stages; each forming of stages starts a new epoch."""
    window_tokens: int | None = None
    """Maximum length of a sequence, prompt and answer together; None before the model was read."""
    prediction: ServingPrediction | None = None
    """The plan and its predicted performance; None without a plan."""
    stages: tuple[StageStatus, ...] = ()
    queue: QueueStatus = QueueStatus()
    tokens_per_s: float = 0.0
    predicted_tokens_per_s: float | None = None
    """Predicted token rate with all sequences in flight; None for an encoder, or without a plan."""
    first_token: LatencyStatus = LatencyStatus()
    next_token: LatencyStatus = LatencyStatus()
    recoveries: int = 0
    """Number of times that the stages became unusable, for example because a member was lost."""
    last_gap_s: float | None = None
    """Duration of the last gap: seconds from noticing a loss until the next token was sampled; None without a gap."""
    interruptions: tuple[Interruption, ...] = ()
    """The last interruptions, in order."""
    holds: tuple[str, ...] = ()
    """Ids of contributors on which members run, or are about to start."""
    proposed_computation: Computation | None = None
    """Choice between compiled and eager code that the replica measured, until the control plane has stored one."""
    error: dict[str, Any] | None = None
    """Code and facts of the error, if the replica failed."""
