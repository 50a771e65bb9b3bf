"""What the store returns: frozen copies of rows, safe to keep after the transaction."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from share_compute import topology
from share_compute.errors import Conflict
from share_compute.jobs.events import Measured, ReplanProposed, RowsDone
from share_compute.jobs.states import ContributorState, JobState
from share_compute.planning.plan import Plan
from share_compute.scopes import Scope, held
from share_compute.serving.states import DeploymentState
from share_compute.specification import Job, ServeJob, TrainJob


class Record(BaseModel):
    """Base of all records."""

    model_config = ConfigDict(frozen=True, from_attributes=True, use_attribute_docstrings=True)


class ApiKeyRecord(Record):
    """A key that opens the REST API, without the key itself."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    """What it was given; `may` also knows what these include."""
    created_at: datetime
    revoked_at: datetime | None

    def may(self, scope: Scope) -> bool:
        """Whether the key holds a scope, or one that includes it."""
        return scope in held(self.scopes)

    def owns(self, owner: str | None) -> bool:
        """Whether what belongs to the key ``owner`` is this key's own; what belongs to no key is for admins."""
        return owner == self.id or self.may(Scope.admin)


class InviteState(StrEnum):
    """Whether an invite still opens the door."""

    open = "open"
    used = "used"
    expired = "expired"
    revoked = "revoked"


class InviteRecord(Record):
    """An invite, without its code."""

    id: str
    label: str | None
    uses: int
    """Machines that may join with it."""
    memory_bytes: int | None
    """Most memory that each of them may lend; null: no limit."""
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None
    """When the last machine joined with it."""
    used_by: tuple[str, ...]
    """Ids of the contributors that joined with it, in the order they joined."""
    revoked_at: datetime | None


def invite_state(invite: InviteRecord, now: datetime) -> InviteState:
    """Say whether an invite can be used at ``now``."""
    if len(invite.used_by) >= invite.uses:
        return InviteState.used
    if invite.revoked_at is not None:
        return InviteState.revoked
    return InviteState.expired if now >= invite.expires_at else InviteState.open


class PresenceRecord(Record):
    """Who a machine is, and whether it is there."""

    id: str
    name: str
    state: ContributorState
    reason: str
    """Why it is in this state."""
    host: str
    """Host name that it gave."""
    versions: dict[str, str]
    last_seen_at: datetime
    left_at: datetime | None


class ContributorRecord(PresenceRecord):
    """A machine that joined."""

    node_id: str | None
    """Its Ray node, in hexadecimal."""
    address: str | None
    """IP address that other members reach it at."""
    job_id: str | None
    """The job that it is leased to."""
    deployment_id: str | None = None
    """The deployment that it is leased to; never to a job as well."""
    limits: dict[str, Any]
    """What its owner lends: memory_bytes, cpu_threads, device, gpu; and host_id, host_threads: on which processors."""
    capacity: tuple[topology.Device, ...] | None
    """What the probe measured; null until it ran."""
    links: tuple[topology.Link, ...] | None
    threads: int | None = None
    """Threads that it was measured with and computes with: those lent, or fewer where machines share its processors."""
    measured_at: datetime | None = None
    """When it was measured last."""
    joined_at: datetime
    sent_away_at: datetime | None
    """When the operator asked it to leave; it cannot come back without a new invite."""
    offences: int = 0
    """Times that it made wrong numbers since the operator cleared it last."""
    quarantined_for: str | None = None
    """Why it gets no work until the operator clears it, also after it comes back; null where it does."""
    sibling_of: str | None = None
    """Id of the contributor with whose key this device of the same host joined; null if it joined with an invite."""

    @property
    def is_leased(self) -> bool:
        """Whether a job or a deployment holds it."""
        return self.job_id is not None or self.deployment_id is not None

    @property
    def invited_as(self) -> str:
        """Id of the contributor that joined with the invite: this one, or another device of its host."""
        return self.sibling_of or self.id

    @property
    def host_id(self) -> str:
        """Label of the processors that it uses, which other machines may share; empty where that is not known."""
        return str(self.limits.get("host_id") or "")

    @property
    def lent_threads(self) -> int:
        """Threads that its owner lends."""
        return int(self.limits.get("cpu_threads") or 1)

    def machine(self) -> topology.Contributor:
        """Return the contributor as the planner sees it."""
        return topology.Contributor(
            id=self.id,
            name=self.name,
            devices=self.capacity or (),
            cpu_threads=self.threads or self.lent_threads,
            host=self.host_id,
            host_threads=int(self.limits.get("host_threads") or 0),
            node_id=self.node_id or "",
            address=self.address or "",
        )


class JobRecord(Record):
    """A job and how far it got."""

    id: str
    owner: str | None = None
    """Id of the API key that submitted it; null for those of earlier versions, which belong to admins."""
    name: str
    kind: str
    state: JobState
    reason: str
    """Why it is in this state, in one sentence."""
    spec: Job
    plan: Plan | None
    measured: Measured | None = None
    """Step times of this attempt, beside what its plan predicted; null until some steps are done."""
    proposal: ReplanProposed | None = None
    """A plan that would pay for moving to it, when reality drifted away from the prediction."""
    is_protected: bool = False
    """Whether each layer is on two machines of a running training job, so that losing any one loses no step."""
    error: dict[str, Any] | None
    """Code and facts of the error, when it failed."""
    attempt: int
    """Counted from 1."""
    fruitless_attempts: int
    """Attempts in a row that were lost before they committed a step."""
    step: int
    """Last committed step; 0 before the first."""
    total_steps: int
    loss: float | None
    """Training loss at the last committed step."""
    tokens_per_s: float | None
    rows: RowsDone | None = None
    """How far a batch got; null before it began, and for training."""
    created_at: datetime
    started_at: datetime | None
    """When its first step began, or its first row was asked for, in any attempt."""
    finished_at: datetime | None
    cancel_requested_at: datetime | None
    checkpoint_path: Path | None
    checkpoint_step: int | None

    @property
    def training(self) -> TrainJob:
        """What was asked for, of a job that trains.

        Raises:
            Conflict: it is of another kind.
        """
        if not isinstance(self.spec, TrainJob):
            raise Conflict(f"job {self.id} trains nothing", mend="name a training job", job=self.id)
        return self.spec

    @property
    def counts_tokens(self) -> bool:
        """Whether its speed is in tokens; else in samples that are no text."""
        return not isinstance(self.spec, TrainJob) or self.spec.model.layers is None


class QueuedJob(Record):
    """A job that waits, without what it asks for."""

    id: str
    name: str
    kind: str
    reason: str
    """Why it waits, in one sentence."""
    attempt: int
    """Counted from 1."""
    fruitless_attempts: int
    """Attempts in a row that were lost before they committed a step."""
    created_at: datetime
    waiting_since: datetime
    """When it was submitted, resumed, or put back after an attempt."""


class DeploymentRecord(Record):
    """A model that is served, or was."""

    id: str
    owner: str | None = None
    """Id of the API key that deployed it; null for those of earlier versions, which belong to admins."""
    name: str
    """What clients send as ``model``."""
    state: DeploymentState
    reason: str
    """Why it is in this state, in one sentence."""
    spec: ServeJob
    plans: tuple[Plan, ...]
    """Which layers are on which machines, for each replica; empty until it was placed."""
    error: dict[str, Any] | None
    """Code and facts of the error, when it failed."""
    created_at: datetime
    ready_at: datetime | None
    """When it answered first."""
    ended_at: datetime | None


class EventRecord(Record):
    """Something that happened to a job or a contributor."""

    seq: int
    """Grows with every event of the server; read on from the last one seen."""
    job_id: str | None
    contributor_id: str | None
    attempt: int | None
    kind: str
    """state, cancel-requested, contributor, work, deployment, or the type of an attempt's event: planned, step, ..."""
    at: datetime
    data: dict[str, Any]


class MetricRecord(Record):
    """What one step measured."""

    split: Literal["train", "validation", "test"]
    step: int
    data: dict[str, Any]


class ArtifactRecord(Record):
    """A finished result on the server's disk."""

    id: str
    job_id: str
    name: str
    path: Path
    size_bytes: int
    created_at: datetime


class HeldRecord(Record):
    """What a machine works for, and which part of the model it holds."""

    job_id: str | None = None
    deployment_id: str | None = None
    name: str
    """Of the job or the deployment."""
    start: int | None = None
    """First layer; null while there is no plan."""
    stop: int | None = None
    """One past the last layer."""
    num_layers: int | None = None
    """Of the whole model."""
    pool: int | None = None
    """Place of its pool in the pipeline, from 0."""
    microbatches: int | None = None
    """Those of each batch that are its own."""
    of_microbatches: int | None = None
    memory_bytes: int | None = None
    """What that needs, as planned."""


class GlanceRecord(Record):
    """A machine, as a map or a table shows it; what was measured has four digits."""

    id: str
    name: str
    owner: str | None
    """For whom its invite was, where that was said."""
    host: str
    state: ContributorState
    reason: str
    kind: Literal["cpu", "cuda"] | None
    """cuda where it has such a device; null until it was measured."""
    device: str | None
    """Names of its devices."""
    flops_per_s: float
    """In float32, of all its devices; 0 until it was measured."""
    lent_bytes: int
    """As measured, before that as its owner said."""
    head_latency_s: float | None
    """Of its path to the server, one way."""
    head_bytes_per_s: float | None
    held: HeldRecord | None
    """null when it is free."""
    joined_at: datetime
    last_seen_at: datetime
    left_at: datetime | None


class SpellRecord(Record):
    """What a machine worked at without a change: one part of one model."""

    job_id: str | None
    deployment_id: str | None
    name: str
    """Of the job or the deployment."""
    start: int | None
    """First layer of its part; null while there was no plan yet."""
    stop: int | None
    """One past the last layer."""
    num_layers: int | None
    """Of the whole model."""
    microbatches: int | None
    """Those of each batch that were its own."""
    of_microbatches: int | None
    """Those of each batch in all."""
    began_at: datetime
    ended_at: datetime | None
    """null while it lasts."""
    seconds: float
    """How long it lasted, or has lasted so far."""
    steps: int
    """Committed during it."""
    tokens: int
    """Of those steps, in its own microbatches; samples where the model reads no text. Deployments count none."""


class WorkRecord(Record):
    """What a machine gave."""

    spells: tuple[SpellRecord, ...]
    """Newest first."""
    is_complete: bool
    """Whether there were no spells before these; the sums are of these."""
    seconds: float
    """In which it held a part of a model."""
    steps: int
    microbatches: int
    """That it computed, forward and backward, in committed steps."""
    tokens: int


class BusyRecord(Record):
    """How busy a machine was."""

    at: datetime
    """When it was measured: over the steps before."""
    busy_fraction: float
    """Share of a step in which it computed."""
    job_id: str
