"""Return types of the store. They are frozen, and can be used after the transaction."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import ConfigDict

from share_compute import topology
from share_compute.device_kinds import DeviceKind
from share_compute.errors import Conflict
from share_compute.files.described import DescribedModel
from share_compute.lifecycle.attempt_events import Measured, ReplanProposed, RowsDone
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.planning.plan import Plan
from share_compute.scopes import Scope, held
from share_compute.specification import Job, LinkName, ServeJob, SparseJob, SweepJob, TrainJob
from share_compute.specification.placement.pinned_plan import PinnedPlan
from share_compute.specification.placement.selection import SelectionSpec


class Record(DescribedModel):
    """Base of all records."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


class ApiKeyRecord(Record):
    """An API key, without its secret."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    """Scopes that were granted."""
    created_at: datetime
    revoked_at: datetime | None

    def may(self, scope: Scope) -> bool:
        """Return whether the key holds this scope, or a scope that includes it."""
        return scope in held(self.scopes)

    def owns(self, owner: str | None) -> bool:
        """Return whether this key may act on objects of the key ``owner``; only admins may if ``owner`` is None."""
        return owner == self.id or self.may(Scope.admin)


class InviteState(StrEnum):
    """Whether machines can still join with an invite."""

    open = "open"
    used = "used"
    expired = "expired"
    revoked = "revoked"


AT_START: Final = "printed at start"
THIS_MACHINE: Final = "this machine"
"""Labels of the invites that a server makes and revokes when it starts."""


class InviteRecord(Record):
    """An invite, without its code."""

    id: str
    label: str | None
    uses: int
    """Number of machines that may join with the invite."""
    memory_bytes: int | None
    """Maximum memory, in bytes, that each machine may lend with this invite; null for no limit."""
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None
    """Time at which a machine last joined with the invite; null if none did."""
    used_by: tuple[str, ...]
    """Ids of the contributors that joined with the invite, in the order they joined."""
    revoked_at: datetime | None


def invite_state(invite: InviteRecord, now: datetime) -> InviteState:
    """Return the state of an invite at ``now``."""
    if len(invite.used_by) >= invite.uses:
        return InviteState.used
    if invite.revoked_at is not None:
        return InviteState.revoked
    return InviteState.expired if now >= invite.expires_at else InviteState.open


class PresenceRecord(Record):
    """Identity of a machine, and whether it is present."""

    id: str
    name: str
    state: ContributorState
    reason: str
    """Cause of the state."""
    host: str
    """Host name that the machine reported."""
    versions: dict[str, str]
    last_seen_at: datetime
    left_at: datetime | None


class ContributorRecord(PresenceRecord):
    """A machine that joined."""

    node_id: str | None
    """Id of the machine's Ray node, in hexadecimal; null while no node is known."""
    address: str | None
    """IP address at which other machines reach this machine; null while no Ray node is known."""
    job_id: str | None
    """Id of the job that the machine is leased to; null if there is none."""
    deployment_id: str | None = None
    """Id of the deployment that the machine is leased to; null if there is none."""
    limits: dict[str, Any]
    """Resources that the owner lends: memory_bytes, cpu_threads, device (kind of the devices), devices (their number)
    and gpus (their UUIDs); and upload_bytes_per_s and download_bytes_per_s, null for no limit. The fields host_id and
    host_threads are the label and the number of the host's processors. The field labels has the labels that the owner
    gives the machine; nobody verifies them."""
    capacity: tuple[topology.Device, ...] | None
    """Devices as the probe measured them; null until the probe ran."""
    links: tuple[topology.Link, ...] | None
    threads: int | None = None
    """Number of threads with which the machine was measured; null if unknown."""
    measured_at: datetime | None = None
    """Time of the last measurement."""
    joined_at: datetime
    removed_at: datetime | None
    """Time at which the operator removed the machine; it cannot come back without a new invite."""
    offences: int = 0
    """Number of reported offences since the operator last cleared the machine."""
    quarantined_for: str | None = None
    """Cause of the quarantine; null if the machine is not in quarantine."""
    sibling_of: str | None = None
    """Id of the contributor of the same host that joined with the invite; null if this contributor did."""

    @property
    def is_leased(self) -> bool:
        """Return whether the machine is leased to a job or a deployment."""
        return self.job_id is not None or self.deployment_id is not None

    @property
    def invited_as(self) -> str:
        """Return the id of the contributor that joined with the invite: this one, or another device of its host."""
        return self.sibling_of or self.id

    @property
    def host_id(self) -> str:
        """Return the label of the host's processors, which is equal for machines that share them; empty if unknown."""
        return str(self.limits.get("host_id") or "")

    @property
    def lent_threads(self) -> int:
        """Return the number of CPU threads that the machine's owner lends; 1 if the number is unknown."""
        return int(self.limits.get("cpu_threads") or 1)

    @property
    def lent_kind(self) -> DeviceKind:
        """Return the kind of the device that the machine's owner lends."""
        return cast("DeviceKind", self.limits.get("device") or "cpu")

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that the machine's owner gives it."""
        return dict(self.limits.get("labels") or {})

    @property
    def most_ranks(self) -> int:
        """Return the largest number of processes that can compute the layers of a member together."""
        return self.machine().most_ranks

    @property
    def lent_devices(self) -> int:
        """Return the number of devices that the machine's owner lends together."""
        return int(self.limits.get("devices") or 1)

    def machine(self) -> topology.Contributor:
        """Return the contributor as a machine of the planner's topology."""
        return topology.Contributor(
            id=self.id,
            name=self.name,
            devices=self.capacity or (),
            cpu_threads=self.threads or self.lent_threads,
            host=self.host_id,
            host_threads=int(self.limits.get("host_threads") or 0),
            upload_bytes_per_s=float(self.limits.get("upload_bytes_per_s") or 0.0),
            download_bytes_per_s=float(self.limits.get("download_bytes_per_s") or 0.0),
            labels=self.labels,
            node_id=self.node_id or "",
            address=self.address or "",
        )


class LinkState(StrEnum):
    """State of a link of a training job."""

    waiting = "waiting"
    """The link starts when the job has succeeded."""
    started = "started"
    failed = "failed"
    cancelled = "cancelled"
    """The job was cancelled. If the job is resumed, the link waits again."""


class LinkRecord(Record):
    """A deployment or batch that starts from the result of a training job."""

    name: LinkName
    """Name of the field below ``then``."""
    state: LinkState
    reason: str
    """Cause of the state, in one sentence."""
    started: str | None = None
    """Id of the deployment or batch; null until it is started."""
    error: dict[str, Any] | None = None
    """Code and facts of the error, if the link failed."""


class RungRecord(Record):
    """A comparison of a trial with others at one step."""

    step: int
    value: float
    """Value of the sweep's metric."""
    is_kept: bool
    """Whether the trial continued."""


class TrialRecord(Record):
    """The part of a sweep that a job has."""

    number: int
    """Number of the trial in its sweep, from 1."""
    settings: dict[str, Any]
    """Values of the searched fields, by their names with dots."""
    rungs: tuple[RungRecord, ...] = ()
    """Comparisons with other trials, in order."""
    stopped: str | None = None
    """Reason for which the sweep stopped the trial; null if it did not."""
    is_interrupted: bool = False
    """Whether the trial was stopped because the sweep was cancelled; it continues if the sweep is resumed."""


class TrialJobRecord(Record):
    """A job that is a trial of a sweep, without its specification."""

    id: str
    owner: str | None
    state: JobState
    reason: str
    """Cause of the state, in one sentence."""
    attempt: int
    step: int
    total_steps: int
    trial: TrialRecord


class SweepProgress(Record):
    """The part of a sweep's progress that its trials do not have."""

    last_started: int = 0
    """Highest number of a trial that was started, also if the trial was deleted since; 0 if there is none."""
    past_s: float = 0.0
    """Time that the sweep ran before it was last resumed, in seconds."""
    began_at: datetime | None = None
    """Time at which the sweep last became ``running``; null if it does not run."""

    def seconds(self, now: datetime) -> float:
        """Return the time that the sweep has run, in seconds."""
        return self.past_s + (0.0 if self.began_at is None else (now - self.began_at).total_seconds())


class JobRecord(Record):
    """A job and its progress."""

    id: str
    owner: str | None = None
    """Id of the API key that owns the job; if null, only admins may change it."""
    name: str
    kind: str
    state: JobState
    reason: str
    """Cause of the state, in one sentence."""
    spec: Job
    plan: Plan | None
    measured: Measured | None = None
    """Last measured step times, beside the predictions of the plan; null before the plan's first measurement."""
    proposal: ReplanProposed | None = None
    """Proposed plan that is not applied yet; null if there is none."""
    is_protected: bool = False
    """Whether each layer of a running training job is on at least two machines, as last reported."""
    computation: str | None = None
    """Whether a job with ``training.compile`` computes with compiled or eager code, and why; null before the choice."""
    error: dict[str, Any] | None
    """Code and facts of the error, if the job failed."""
    attempt: int
    """Number of the attempt, from 1."""
    fruitless_attempts: int
    """Number of consecutive attempts that ended before they committed a step."""
    step: int
    """Last committed step, or the step of the checkpoint to restart from; 0 if there is neither. Finished trials of a
    sweep."""
    total_steps: int
    """Number of steps of a training job, or of trials of a sweep."""
    loss: float | None
    """Training loss at the last committed step."""
    tokens_per_s: float | None
    """Mean speed over the last steps; over all steps, once an attempt ended the job."""
    rows: RowsDone | None = None
    """Progress of a batch job; null before it began, and for training jobs."""
    created_at: datetime
    started_at: datetime | None
    """Time at which the job first became ``running``, in any attempt; null before."""
    finished_at: datetime | None
    cancel_requested_at: datetime | None
    checkpoint_path: Path | None
    checkpoint_step: int | None
    tags: tuple[str, ...] = ()
    """Present tags; ``spec`` has those of the submission."""
    group: str | None = None
    """Present group of jobs that belong together; ``spec`` has that of the submission."""
    note: str = ""
    """Text that users wrote about the job; empty if there is none."""
    links: tuple[LinkRecord, ...] = ()
    """Deployment and batch that start from the result, in the order in which they start."""
    sweep_id: str | None = None
    """Id of the sweep whose trial the job is; null for other jobs."""
    trial: TrialRecord | None = None
    """Settings of the trial and its comparisons; null for jobs that are no trial of a sweep."""

    @property
    def training(self) -> TrainJob:
        """Return the specification of a training job.

        Raises:
            Conflict: the job is of another kind.
        """
        if not isinstance(self.spec, TrainJob):
            raise Conflict(f"job {self.id} trains nothing", hint="name a training job", job=self.id)
        return self.spec

    @property
    def sweep(self) -> SweepJob:
        """Return the specification of a sweep.

        Raises:
            Conflict: the job is of another kind.
        """
        if not isinstance(self.spec, SweepJob):
            raise Conflict(f"job {self.id} is no sweep", hint="name a job of kind: sweep", job=self.id)
        return self.spec

    @property
    def counts_tokens(self) -> bool:
        """Return whether the job's speed is measured in tokens; otherwise in samples, for models that write no text."""
        if isinstance(self.spec, SparseJob):
            return False
        return not isinstance(self.spec, TrainJob) or self.spec.data.is_plain_text

    @property
    def counts_steps(self) -> bool:
        """Return whether the job's progress is counted in steps; otherwise in rows of a batch."""
        return isinstance(self.spec, TrainJob | SparseJob)

    @property
    def machines_needed(self) -> int:
        """Return the minimum number of machines for the job to start.

        A job with a pinned plan that ran before may continue on fewer machines.
        """
        if isinstance(self.spec, SparseJob) or (self._pinned is not None and self.started_at is not None):
            return 1
        return self.training.parallelism.machines_needed

    @property
    def gains_from_more(self) -> bool:
        """Return whether the job can use more machines than it needs."""
        if isinstance(self.spec, SparseJob):
            return self.spec.machines_used > 1
        if self._pinned is not None:
            has_left = self.plan is None or not self.plan.carries_out(self._pinned)
            return self.started_at is not None and has_left
        return self.training.parallelism.stages is None

    @property
    def selection(self) -> SelectionSpec:
        """Return the machines that the job may use; all machines for jobs without such a field."""
        return self.spec.parallelism if isinstance(self.spec, TrainJob | SparseJob) else SelectionSpec()

    def may_use(self, machine: ContributorRecord) -> bool:
        """Return whether the job may use a machine: its selection and, at its first start, its pinned plan allow it."""
        pinned = self.pinned_machines
        return (pinned is None or machine.name in pinned) and self.selection.allows(machine)

    @property
    def _pinned(self) -> PinnedPlan | None:
        """The plan that a training job pins; None if there is none."""
        return self.spec.parallelism.plan if isinstance(self.spec, TrainJob) else None

    @property
    def pinned_machines(self) -> frozenset[str] | None:
        """Return the names of the only machines on which the job may start; None if it may start on any.

        A job that ran before continues on other machines if its pinned plan no longer holds.
        """
        if self._pinned is None or self.started_at is not None:
            return None
        return frozenset(self._pinned.names)


class QueuedJob(Record):
    """A job in the queue, without its specification."""

    id: str
    name: str
    kind: str
    reason: str
    """Cause of the wait, in one sentence."""
    sweep_id: str | None = None
    """Id of the sweep of which the job is a trial; null for other jobs."""
    attempt: int
    """Number of the attempt, from 1."""
    fruitless_attempts: int
    """Number of consecutive attempts that ended before they committed a step."""
    created_at: datetime
    waiting_since: datetime
    """Time at which the job was submitted, resumed, or put back after an attempt."""


class DeploymentRecord(Record):
    """A model that is or was served."""

    id: str
    owner: str | None = None
    """Id of the API key that deployed it; null for deployments of earlier versions, which belong to admins."""
    name: str
    """Value that clients send as ``model``."""
    state: DeploymentState
    reason: str
    """Cause of the state, in one sentence."""
    spec: ServeJob
    plans: tuple[Plan, ...]
    """Placement of layers on machines, one plan for each replica; empty until a replica was placed."""
    computation: Computation | None = None
    """Choice between compiled and eager code, for a deployment with ``compile``; null before the choice."""
    error: dict[str, Any] | None
    """Code and facts of the error, if the deployment failed."""
    created_at: datetime
    ready_at: datetime | None
    """Time at which it was first ready to answer requests."""
    ended_at: datetime | None


class EventRecord(Record):
    """An event of a job, a contributor, a deployment or the server."""

    seq: int
    """Sequence number; later events have higher numbers."""
    job_id: str | None
    contributor_id: str | None
    attempt: int | None
    kind: str
    """state, cancel-requested, contributor, offence, work, deployment, deleted, alerts, or the type of an attempt's
    event: planned, step, ..."""
    at: datetime
    data: dict[str, Any]


class MetricRecord(Record):
    """Metrics of one step."""

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
    """The job or deployment that a machine is leased to, and the part of the model that it holds."""

    job_id: str | None = None
    deployment_id: str | None = None
    name: str
    """Name of the job or the deployment."""
    start: int | None = None
    """First layer; null while there is no plan."""
    stop: int | None = None
    """One past the last layer."""
    num_layers: int | None = None
    """Number of layers of the whole model."""
    stage: int | None = None
    """Index of the machine's stage in the pipeline, from 0."""
    microbatches: int | None = None
    """Number of microbatches that the machine computes in each batch."""
    of_microbatches: int | None = None
    memory_bytes: int | None = None
    """Memory that the part needs according to the plan."""


class MachineSummaryRecord(Record):
    """Summary of a machine for a map or a table; measurements have four significant digits."""

    id: str
    name: str
    owner: str | None
    """Label of the invite with which the machine's host joined; null if the invite has none."""
    host: str
    state: ContributorState
    reason: str
    kind: DeviceKind | None
    """Kind of the machine's GPU, or cpu without one; null until the machine was measured."""
    device: str | None
    """Names of the machine's devices, separated by commas; null until the machine was measured."""
    flops_per_s: float
    """Measured speed of all devices together, in float32 FLOP/s; 0 until the machine was measured."""
    lent_bytes: int
    """Memory of the measured devices; before a measurement, the memory that the owner lends."""
    head_latency_s: float | None
    """One-way latency between the machine and the server; null until it was measured."""
    head_bytes_per_s: float | None
    held: HeldRecord | None
    """Job or deployment that the machine is leased to; null if the machine is free."""
    joined_at: datetime
    last_seen_at: datetime
    left_at: datetime | None


class AgentRecord(Record):
    """State and work of a machine, for its agent; measurements have four significant digits."""

    id: str
    state: ContributorState
    reason: str
    held: HeldRecord | None
    """Job or deployment that the machine is leased to; null if the machine is free."""
    tokens_per_s: float | None
    """Throughput of the whole job; null without a job, or if it is unknown."""
    flops_per_s: float | None
    head_latency_s: float | None
    head_bytes_per_s: float | None
