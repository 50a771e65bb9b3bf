"""How a deployment is: what its server tells the control plane, as JSON."""

from __future__ import annotations

from typing import Any

from share_compute.planning.report import ServingPrediction
from share_compute.serving.states import DeploymentState
from share_compute.strict import StrictModel


class PoolStatus(StrictModel):
    """One pool of a deployment, and how its machine does."""

    contributor_id: str
    name: str
    """Of its machine."""
    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    is_alive: bool
    """Whether it gave a sign of life lately."""
    busy_fraction: float | None = None
    """Share of the last seconds in which it computed; None before it was measured."""
    predicted_busy_fraction: float | None = None
    """The same on paper, with all sequences in flight."""
    process_id: int | None = None
    """Of its member, on that machine."""
    resident_bytes: int = 0
    """Memory of that process."""
    cache_bytes: int = 0
    """Of it, caches of sequences."""


class LatencyStatus(StrictModel):
    """Measured beside predicted, in seconds; None where there is nothing to tell."""

    p50_s: float | None = None
    p95_s: float | None = None
    predicted_s: float | None = None
    """Of a request alone for objective latency, with all sequences in flight for throughput."""


class QueueStatus(StrictModel):
    """Sequences in the scheduler's hands."""

    queued: int = 0
    """Those that are to go on, after a loss or since memory was short, among them."""
    running: int = 0
    batch_size: float | None = None
    """Sequences in one turn, the mean of the last turns; None before there were any."""
    turns_in_flight: int = 0
    kv_tokens: int = 0
    """Tokens whose caches fit."""
    kv_tokens_used: int = 0
    """Of them, reserved for sequences that run."""
    kv_tokens_cached: int = 0
    """Of them, kept from ended sequences for others that begin alike."""
    prefix_hits: int = 0
    """Sequences that were begun with a copy of another one's first tokens."""
    emitted_tokens: int = 0
    wasted_tokens: int = 0
    """Computed behind an end that was not known yet."""
    preempted: int = 0
    """Sequences that gave up their room, since it was full and there was none for more."""


class Interruption(StrictModel):
    """A time in which a replica computed nothing, since it lost a part. Requests waited; no token was lost."""

    number: int
    """Counts those of one server, from 1."""
    reason: str
    """What happened, in a few words."""
    machines: tuple[str, ...] = ()
    """Names of the machines that were lost; none when something else went wrong."""
    ago_s: float
    """How long ago it was noticed."""
    seconds: float | None = None
    """From then until pools were formed again; None while there are none."""


class ServingStatus(StrictModel):
    """One replica of a deployment at one moment."""

    state: DeploymentState
    reason: str
    """Why, in one sentence."""
    is_looking: bool = False
    """Whether it still looks at its model, and cannot say yet which machines it needs."""
    epoch: int = 0
    """Counts the memberships."""
    window_tokens: int | None = None
    """Longest sequence; None before the model was looked at."""
    prediction: ServingPrediction | None = None
    """The plan, and what it promises; None while nothing is placed."""
    pools: tuple[PoolStatus, ...] = ()
    queue: QueueStatus = QueueStatus()
    tokens_per_s: float = 0.0
    predicted_tokens_per_s: float | None = None
    """With all sequences in flight."""
    first_token: LatencyStatus = LatencyStatus()
    next_token: LatencyStatus = LatencyStatus()
    recoveries: int = 0
    """Memberships that began because a machine was lost."""
    last_gap_s: float | None = None
    """From the last loss that was noticed until its successors computed again."""
    interruptions: tuple[Interruption, ...] = ()
    """The last ones, in order."""
    holds: tuple[str, ...] = ()
    """Ids of contributors on which members run, or are about to."""
    error: dict[str, Any] | None = None
    """Code and facts, when it failed."""
