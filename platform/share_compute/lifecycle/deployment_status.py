"""Status of a replica of a deployment, as the replica's server reports it to the control plane in JSON."""

from __future__ import annotations

from typing import Any

from share_compute.files.strict import StrictModel
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.planning.report import ServingPrediction


class StageStatus(StrictModel):
    """One stage of a replica, and the state of the member and the machine that hold it."""

    contributor_id: str
    name: str
    """Name of its machine."""
    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    is_alive: bool
    """Whether a heartbeat arrived recently."""
    busy_fraction: float | None = None
    """Fraction of the last seconds in which its member computed, 0 to 1; None before it was measured."""
    predicted_busy_fraction: float | None = None
    """Predicted fraction of the time in which its member computes, with all sequences in flight; None if unknown."""
    process_id: int | None = None
    """Process id of its member on that machine."""
    resident_bytes: int = 0
    """Resident memory (RSS) of that process."""
    cache_bytes: int = 0
    """Memory of the KV slots of this stage; on a GPU it is not part of ``resident_bytes``."""


class LatencyStatus(StrictModel):
    """Measured and predicted latency, in seconds; None where unknown."""

    p50_s: float | None = None
    p95_s: float | None = None
    predicted_s: float | None = None
    """Predicted latency of a request that runs alone.

    With objective throughput, the latency of the next token is predicted for all sequences in flight.
    """


class QueueStatus(StrictModel):
    """Sequences of the scheduler, and its use of KV capacity."""

    queued: int = 0
    """Waiting sequences, including sequences that were interrupted by a membership change or a lack of KV capacity."""
    running: int = 0
    batch_size: float | None = None
    """Mean number of sequences in the last engine steps; None before there were any."""
    steps_in_flight: int = 0
    kv_tokens: int = 0
    """KV capacity: number of tokens whose caches fit."""
    kv_tokens_used: int = 0
    """Part of the KV capacity reserved for sequences that run."""
    kv_tokens_cached: int = 0
    """Part of the KV capacity in slots of ended sequences, kept for later sequences with the same first tokens."""
    prefix_hits: int = 0
    """Number of KV slots that started with a copy of another slot's first tokens."""
    emitted_tokens: int = 0
    wasted_tokens: int = 0
    """Tokens sampled after the end of their sequence, in engine steps sent before the end was known."""
    preempted: int = 0
    """Number of times that a sequence gave up its full KV slot because no larger slot fitted."""


class Interruption(StrictModel):
    """A time in which a replica computed nothing because it lost a part. Requests waited; no token was lost."""

    number: int
    """Sequence number of the interruption, from 1, counted by the replica's server."""
    reason: str
    """Cause, in a few words."""
    machines: tuple[str, ...] = ()
    """Names of the machines that were lost; empty if something else went wrong."""
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
    """Whether it still reads its model, so that the machines it needs are unknown."""
    epoch: int = 0
    """Epoch of the present stages; each time that stages are formed, a new epoch starts."""
    window_tokens: int | None = None
    """Maximum length of a sequence, prompt and answer together; None before the model was read."""
    prediction: ServingPrediction | None = None
    """The plan and its predicted performance; None while nothing is placed."""
    stages: tuple[StageStatus, ...] = ()
    queue: QueueStatus = QueueStatus()
    tokens_per_s: float = 0.0
    predicted_tokens_per_s: float | None = None
    """Predicted token rate with all sequences in flight; None for an encoder, or while nothing is placed."""
    first_token: LatencyStatus = LatencyStatus()
    next_token: LatencyStatus = LatencyStatus()
    recoveries: int = 0
    """Number of times that members or their results were lost, so that the stages had to be formed again."""
    last_gap_s: float | None = None
    """Duration of the last gap: seconds from noticing a loss until the next token was sampled; None without a gap."""
    interruptions: tuple[Interruption, ...] = ()
    """The last interruptions, in order."""
    holds: tuple[str, ...] = ()
    """Ids of contributors on which members run, or are about to start."""
    error: dict[str, Any] | None = None
    """Code and facts of the error, if it failed."""
