"""Load of the cluster at one moment: the work of each machine, job and deployment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from share_compute.lifecycle.attempt_events import LinkBytes, TrafficMeasured
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.lifecycle.states import GONE, JobState
from share_compute.planning.plan import MemberPlan, Plan
from share_compute.specification import SparseJob, TrainJob
from share_compute.store.records import EventRecord, JobRecord, MachineSummaryRecord, QueuedJob
from share_compute_api.client.client import Client
from share_compute_api.schemas.bodies import DeploymentView
from share_compute_api.schemas.utilization import UtilizationSample

_PAGE = 5000
_ACTIVE = (JobState.planning, JobState.running)
_NO_TRAFFIC = (
    "step",
    "rows",
    "validated",
    "sampled",
    "measured",
    "layers-timed",
    "round",
    "checkpoint",
    "note",
)
"""Frequent kinds of events that have no traffic."""


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """A machine, its utilization and its part of a model; figures that were not measured are None."""

    id: str
    name: str
    state: str
    reason: str
    work: str | None
    """Name of the job or the deployment."""
    start: int | None
    """First layer."""
    stop: int | None
    """One past the last layer."""
    busy_fraction: float | None
    """Used part of the lent GPU or CPU threads, 0 to 1; without this measurement the fraction of a step in which the
    machine computed."""
    memory_bytes: int | None
    """Memory of the lent device that is in use; without this measurement the memory that the plan needs."""
    lent_bytes: int
    sent_bytes_per_s: float | None
    received_bytes_per_s: float | None
    utilization: UtilizationSample | None = None
    """Measurement of the machine's agent in the last minute."""


@dataclass(frozen=True, slots=True)
class JobLoad:
    """A job that runs or waits."""

    id: str
    name: str
    kind: str
    state: str
    reason: str
    """Cause of the state, for example what a queued job waits for."""
    done: int
    """Committed steps, finished trials or finished rows."""
    total: int
    unit: str
    """Unit of ``done``: steps, trials or rows."""
    loss: float | None
    per_s: float | None
    """Speed in tokens or samples a second."""
    is_tokens: bool
    """Whether the speed is in tokens."""
    left_s: float | None
    """Seconds until the last step or row at the present speed."""


@dataclass(frozen=True, slots=True)
class DeploymentLoad:
    """A deployment that is up; sums over its replicas."""

    id: str
    name: str
    state: str
    reason: str
    ready: int
    """Number of replicas that answer."""
    wanted: str
    """Requested number or range of replicas, such as ``0..4``."""
    tokens_per_s: float
    running: int
    """Sequences that are generated now."""
    queued: int
    kv_fraction: float | None
    """Used part of the KV capacity, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Load of a cluster at one moment."""

    url: str
    at: datetime
    """Time of the server's clock, in UTC."""
    machines: tuple[MachineLoad, ...]
    jobs: tuple[JobLoad, ...]
    """Jobs that run, then those that wait, in the order of the queue."""
    deployments: tuple[DeploymentLoad, ...]


class LoadReader:
    """Reads the load of a cluster again and again.

    Args:
        client: client of the server.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._traffic: dict[str, _Traffic] = {}
        """Job id -> traffic of its machines."""

    def read(self) -> ClusterLoad:
        """Return the present load."""
        client = self._client
        at = client.health().time
        machines = [one for one in client.cluster().machines if one.state not in GONE]
        used = client.utilization().machines
        jobs = client.jobs(state=_ACTIVE, trials=True, limit=500).jobs
        deployments = client.deployments(limit=500).deployments
        served = {one.id: client.deployment_status(one.id).replicas for one in deployments}
        traffic = {job.id: self._traffic.get(job.id) or _Traffic() for job in jobs}
        for job_id, found in traffic.items():
            while events := client.events(job_id, after=found.after, limit=_PAGE, without=_NO_TRAFFIC).events:
                found.add(events)
        self._traffic = traffic
        uses = {use.id: use for use in (*_training_uses(jobs), *_serving_uses(served.values()))}
        return ClusterLoad(
            url=client.url,
            at=at,
            machines=tuple(
                _machine(
                    one, uses.get(one.id), self._rates(one), used[one.id].latest if one.id in used else None
                )
                for one in machines
            ),
            jobs=(*map(_job, jobs), *map(_queued, client.queue())),
            deployments=tuple(_deployment(one, served[one.id]) for one in deployments),
        )

    def _rates(self, machine: MachineSummaryRecord) -> tuple[float, float] | None:
        """Return the bytes per second that a machine sends and receives for its job; None if unknown."""
        traffic = self._traffic.get(machine.held.job_id or "") if machine.held is not None else None
        return None if traffic is None else traffic.rates.get(machine.id)


class _Traffic:
    """Traffic of the machines of one job."""

    def __init__(self) -> None:
        self.after = 0
        """Number of the last event that was read."""
        self.rates: dict[str, tuple[float, float]] = {}
        """Contributor id -> (sent, received) bytes a second, between its last two reports."""
        self._last: dict[str, datetime] = {}
        """Contributor id -> time of its last report."""

    def add(self, events: Sequence[EventRecord]) -> None:
        """Add the events that follow those of earlier calls."""
        self.after = events[-1].seq
        for event in events:
            if event.kind == "traffic":
                for contributor_id, link in TrafficMeasured.model_validate(event.data).machines.items():
                    self._count(contributor_id, link, event.at)

    def _count(self, contributor_id: str, link: LinkBytes, at: datetime) -> None:
        before = self._last.get(contributor_id)
        self._last[contributor_id] = at
        if before is not None and (seconds := (at - before).total_seconds()) > 0:
            self.rates[contributor_id] = link.sent_bytes / seconds, link.received_bytes / seconds


@dataclass(frozen=True, slots=True)
class _Use:
    """Use of a machine by one member."""

    id: str
    busy_fraction: float | None
    memory_bytes: int | None


def _training_uses(jobs: Iterable[JobRecord]) -> list[_Use]:
    uses = []
    for job in jobs:
        measured = job.measured
        for member in () if job.plan is None else _members(job.plan):
            busy_s = measured.machines.get(member.contributor_id) if measured is not None else None
            share = (
                None if measured is None or busy_s is None else min(1.0, busy_s / measured.measured_step_s)
            )
            uses.append(_Use(member.contributor_id, share, member.memory_bytes))
    return uses


def _members(plan: Plan) -> list[MemberPlan]:
    stages = (*plan.stages, *(stage for branch in plan.branches for stage in branch.stages))
    return [member for stage in stages for member in stage.members]


def _serving_uses(served: Iterable[Sequence[ServingStatus]]) -> list[_Use]:
    stages = [stage for replicas in served for replica in replicas for stage in replica.stages]
    return [_Use(one.contributor_id, one.busy_fraction, one.resident_bytes or None) for one in stages]


def _machine(
    machine: MachineSummaryRecord,
    use: _Use | None,
    rates: tuple[float, float] | None,
    measured: UtilizationSample | None,
) -> MachineLoad:
    held = machine.held
    sent, received = rates or (None, None)
    busy = None if use is None else use.busy_fraction
    memory = None if use is None else use.memory_bytes
    if measured is not None:
        busy = busy if measured.busy_fraction is None else measured.busy_fraction
        own = measured.memory_bytes if measured.gpu_memory_bytes is None else measured.gpu_memory_bytes
        memory = memory if own is None else own
    return MachineLoad(
        id=machine.id,
        name=machine.name,
        state=machine.state.value,
        reason=machine.reason,
        work=None if held is None else held.name,
        start=None if held is None else held.start,
        stop=None if held is None else held.stop,
        busy_fraction=busy,
        memory_bytes=memory,
        lent_bytes=machine.lent_bytes,
        sent_bytes_per_s=sent,
        received_bytes_per_s=received,
        utilization=measured,
    )


def _job(job: JobRecord) -> JobLoad:
    unit = "trials" if job.spec.kind == "sweep" else "steps" if job.counts_steps else "rows"
    done, total = (job.rows.done, job.rows.total) if job.rows is not None else (job.step, job.total_steps)
    return JobLoad(
        id=job.id,
        name=job.name,
        kind=job.kind,
        state=job.state.value,
        reason=job.reason,
        done=done,
        total=total,
        unit=unit,
        loss=job.loss,
        per_s=job.tokens_per_s,
        is_tokens=job.counts_tokens,
        left_s=left_s(job),
    )


def _queued(job: QueuedJob) -> JobLoad:
    return JobLoad(
        id=job.id,
        name=job.name,
        kind=job.kind,
        state=JobState.queued.value,
        reason=job.reason,
        done=0,
        total=0,
        unit="steps",
        loss=None,
        per_s=None,
        is_tokens=True,
        left_s=None,
    )


def _deployment(deployment: DeploymentView, replicas: Sequence[ServingStatus]) -> DeploymentLoad:
    capacity = sum(one.queue.kv_tokens for one in replicas)
    used = sum(one.queue.kv_tokens_used for one in replicas)
    return DeploymentLoad(
        id=deployment.id,
        name=deployment.name,
        state=deployment.state.value,
        reason=deployment.reason,
        ready=0 if deployment.replicas is None else deployment.replicas.ready,
        wanted=str(deployment.spec.replicas),
        tokens_per_s=sum(one.tokens_per_s for one in replicas),
        running=sum(one.queue.running for one in replicas),
        queued=sum(one.queue.queued for one in replicas),
        kv_fraction=used / capacity if capacity else None,
    )


def left_s(job: JobRecord) -> float | None:
    """Return the seconds until the last step or row of a job at its present speed; None if the speed is unknown."""
    if job.rows is not None:
        return (job.rows.total - job.rows.done) / job.rows.rows_per_s if job.rows.rows_per_s else None
    per_step = _samples(job.spec)
    if not job.tokens_per_s or per_step is None:
        return None
    return max(0, job.total_steps - job.step) * per_step / job.tokens_per_s


def _samples(spec: object) -> int | None:
    """Return the tokens of one step, or the samples for models without text; None for other kinds of jobs."""
    if isinstance(spec, SparseJob):
        return spec.training.batch_size * spec.training.workers
    if not isinstance(spec, TrainJob):
        return None
    branches = 1 if spec.training.rounds is None else spec.training.rounds.branches
    samples = spec.training.batch_size * branches
    return samples * spec.training.sequence_length if spec.data.is_plain_text else samples
