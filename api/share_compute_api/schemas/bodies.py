"""Bodies of the REST API other than the store's records. Must not import FastAPI: the client imports this module."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from share_compute.files.data_preview import DataPreview
from share_compute.files.described import DescribedModel
from share_compute.files.plain_text import PlainText
from share_compute.files.strict import StrictModel
from share_compute.files.topology_file import TopologyDocument, check_kind
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.scopes import GRANTABLE, Scope
from share_compute.specification import Kind, Objective, Replicas, TrainJob, parse_job
from share_compute.specification.workload import ServingWorkload
from share_compute.store.records import (
    AT_START,
    THIS_MACHINE,
    ApiKeyRecord,
    ArtifactRecord,
    ContributorRecord,
    DeploymentRecord,
    EventRecord,
    InviteRecord,
    InviteState,
    JobRecord,
    MetricRecord,
    QueuedJob,
)
from share_compute_api.connection.join_line import INSTALL_COMMAND
from share_compute_api.schemas.choices import LONGEST_INVITE_S, UploadKind
from share_compute_api.schemas.frames import flat, frame_of

MOMENT = "2026-01-31T12:00:00Z"
"""Time used in examples."""


class ResponseBody(DescribedModel):
    """Base class of the answers of the REST API."""

    model_config = ConfigDict(frozen=True)


def example(**values: Any) -> ConfigDict:
    """Return the configuration of a body model with one example for the OpenAPI document."""
    return ConfigDict(json_schema_extra={"examples": [values]})


class FailureRequest(StrictModel):
    """Fault to inject into a member of a running job."""

    model_config = example(kind="stop", contributor_id="c-0a1b2c", duration_s=5.0)

    kind: Literal["kill", "stop"]
    """kill: the member's process ends at once. stop: the process is suspended for a while, with its sockets open."""
    contributor_id: str = Field(max_length=100)
    """Id of the machine on which the member runs."""
    duration_s: float = Field(default=0.0, ge=0, le=3600)
    """Time for which the process is suspended; for stop only."""

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        if (self.kind == "stop") != (self.duration_s > 0):
            raise ValueError("duration_s is for stop, which needs it")
        return self


class FailureMade(ResponseBody):
    """Fault that was injected into a member."""

    kind: Literal["kill", "stop"]
    contributor_id: str
    at: datetime
    """Time at which the fault was requested, by the server's clock."""


class Versions(StrictModel):
    """Versions of software that must match on all machines of a cluster."""

    model_config = example(python="3.11.7", ray="2.60.0", torch="2.13.0", share_compute="0.2.0")

    python: str
    """All three numbers must be the same on all machines, because Ray's processes exchange pickles."""
    ray: str
    """Must be the same on all machines."""
    torch: str
    """The first two numbers must be the same on all machines, because kernels differ between versions."""
    share_compute: str
    """The first two numbers must be the same on all machines."""


class Health(ResponseBody):
    """Health and clock of the server. The answer has no other facts, because the route needs no key."""

    status: Literal["ok"] = "ok"
    time: datetime
    """The server's clock, in UTC."""


class Status(ResponseBody):
    """Overview of the server, its machines and its jobs."""

    url: str
    is_for_one_machine: bool
    """Whether only the server's own machine can join: ``url`` is a loopback address, or plain HTTP that the operator
    does not allow."""
    data_folder: str | None = None
    """Folder of the server's state; null for keys without the scope ``admin``."""
    data_roots: tuple[str, ...]
    """Folders of the server in which jobs may name files; empty if jobs can use only uploaded data."""
    database: Literal["sqlite", "postgresql"]
    has_cluster: bool
    """Whether machines can join and jobs can run."""
    ray_address: str | None = None
    """host:port of the Ray head; null without a cluster, and for keys without the scope ``admin``."""
    versions: Versions
    started_at: datetime
    disk_free_bytes: int
    """Free space on the disk of the data folder."""
    contributors: dict[ContributorState, int]
    jobs: dict[JobState, int]


class Alert(ResponseBody):
    """Condition that needs the operator's attention; the alert ends with the condition."""

    id: str
    """Id that stays the same while the condition lasts."""
    kind: Literal[
        "no-cluster",
        "disk",
        "machine-lost",
        "machine-unresponsive",
        "machine-quarantined",
        "versions-differ",
        "job-failed",
        "job-waits",
        "job-fruitless",
        "deployment-failed",
        "deployment-degraded",
        "deployment-waits",
    ]
    severity: Literal["error", "warning"]
    """error: something does not work. warning: something may soon stop working."""
    text: str
    """Description of the condition."""
    name: str | None = None
    """Name of the machine, job or deployment, as in ``text``; null for alerts about the server."""
    hint: str | None = None
    """Action that the operator can take."""
    since: datetime | None = None
    """Time at which the condition began; null if it was not recorded."""
    job_id: str | None = None
    contributor_id: str | None = None
    deployment_id: str | None = None


class AlertList(ResponseBody):
    """All current alerts: errors before warnings, then newest first."""

    alerts: list[Alert]


class QueueView(ResponseBody):
    """Queued jobs, in the order in which they were submitted."""

    jobs: list[QueuedJob]


class SignInRequest(StrictModel):
    """API key, or code of a sign-in link, to exchange for a session."""

    model_config = example(key="sck_...")

    key: str | None = Field(default=None, min_length=1, max_length=200)
    """An API key."""
    code: str | None = Field(default=None, min_length=1, max_length=200)
    """One-time code of a sign-in link."""

    @model_validator(mode="after")
    def _has_one(self) -> SignInRequest:
        if (self.key is None) == (self.code is None):
            raise ValueError("give a key or a code")
        return self


class SignInCode(ResponseBody):
    """One-time code that signs a browser in."""

    model_config = example(code="Zm9v...", url="https://192.0.2.1:8700/#code=Zm9v...", expires_at=MOMENT)

    code: str
    url: str
    """URL that opens the dashboard and signs the browser in. The code follows the #, so it is not sent in requests."""
    expires_at: datetime


class SessionView(ResponseBody):
    """Session of the requesting browser; all fields are null if the browser is not signed in."""

    key: ApiKeyRecord | None
    """API key of the session; null if the browser is not signed in."""
    expires_at: datetime | None
    """End of the session; null if the browser is not signed in. Requests for the session renew it."""
    last_event: int | None
    """Number of the newest event; null if the browser is not signed in.

    A client that first fetches data and then streams the events after this number misses no change.
    """


def _grantable(scope: Scope) -> Scope:
    if scope not in GRANTABLE:
        raise ValueError(f"{scope} is a scope for the keys of machines only; an API key cannot have it")
    return scope


GrantedScope: TypeAlias = Annotated[Scope, AfterValidator(_grantable)]


class KeyRequest(StrictModel):
    """Request for a new API key."""

    model_config = example(name="Ada's scripts", scopes=["submit"])

    name: PlainText = Field(min_length=1, max_length=200)
    """Person or purpose of the key."""
    scopes: tuple[GrantedScope, ...] = Field(default=(Scope.chat,), min_length=1, max_length=len(GRANTABLE))
    """Rights of the key: ``submit`` includes ``read`` and ``chat``, ``admin`` includes all."""


class KeyCreated(ResponseBody):
    """A new API key; no other answer contains the key."""

    model_config = example(
        id="key-k3v7q2ma",
        name="Ada's scripts",
        scopes=["submit"],
        key="sck_...",
        export_command="export SHARE_COMPUTE_URL=https://192.0.2.1:8700 SHARE_COMPUTE_API_KEY=sck_...",
    )

    id: str
    name: str
    scopes: tuple[Scope, ...]
    key: str
    """The key, to send as ``Authorization: Bearer KEY``."""
    export_command: str
    """Command for a shell in which share-compute's commands and Python client then use this server and this key."""


class KeyList(ResponseBody):
    """API keys, oldest first."""

    keys: list[ApiKeyRecord]
    caller_id: str
    """Id of the API key of this request."""


class InviteRequest(StrictModel):
    """Request for a new invite."""

    model_config = example(label="laptops of Ada", expires_in_s=3600, uses=2)

    label: PlainText | None = Field(default=None, max_length=200)
    """Person or purpose of the invite."""
    expires_in_s: float = Field(default=3600, gt=0, le=LONGEST_INVITE_S)
    """Validity of the invite, in seconds."""
    uses: int = Field(default=1, ge=1, le=10_000)
    """Number of machines that may join with the invite."""
    memory_bytes: int | None = Field(default=None, ge=1, le=2**63 - 1)
    """Maximum memory that each of these machines may lend; null means no limit."""

    @field_validator("label")
    @classmethod
    def _is_free(cls, label: str | None) -> str | None:
        if label in (AT_START, THIS_MACHINE):
            raise ValueError(
                f"must be another text than {label!r}, the label of an invite that `up` makes and revokes"
            )
        return label


class InviteView(InviteRecord):
    """An invite, its state, and the machines that joined with it."""

    state: InviteState
    machines: tuple[str, ...] = ()
    """Names of the contributors that joined with the invite, in the order they joined."""


class InviteCreated(ResponseBody):
    """A new invite; no other answer contains the code."""

    model_config = example(
        id="inv-k3v7q2ma",
        code="abcd-efgh-ijkl-mnop",
        expires_at=MOMENT,
        join_command="SHARE_COMPUTE_INVITE=abcd-efgh-ijkl-mnop share-compute join https://192.0.2.1:8700",
    )

    id: str
    code: str
    """Code of the invite. If clients verify the server's key, the code ends with a dot and the key's fingerprint."""
    expires_at: datetime
    uses: int = 1
    """Number of machines that may join with the invite."""
    join_command: str
    """Command for the joining machine. An environment variable holds the code, since other users can read arguments."""
    install_command: str = INSTALL_COMMAND
    """Command to run on the machine before ``join_command``, if share-compute is not installed there."""


class TokenRotated(ResponseBody):
    """Outcome of a change of the cluster's token."""

    jobs: int
    """Number of jobs that were suspended; each job continues from its last checkpoint."""
    seconds: float
    """Time from the first suspension of a job until the Ray head ran with the new token."""


class JobPage(ResponseBody):
    """Page of jobs, newest first."""

    jobs: list[JobRecord]
    results: dict[str, dict[str, float]]
    """Last metrics of each job by its id, with the names that comparisons use; jobs without metrics are missing."""
    next_cursor: str | None
    """Cursor of the next page; null on the last page."""

    def to_pandas(self) -> Any:
        """Return a pandas table with a row for each job, with its last metrics.

        Raises:
            UserError: pandas is not installed.
        """
        return frame_of({**flat(job), **self.results.get(job.id, {})} for job in self.jobs)


class ReplicaCounts(ResponseBody):
    """Number of replicas of a deployment by state, and the number that its load needs."""

    ready: int
    """Number of replicas that answer."""
    wanted: int
    """Number of replicas that the load needs, within the range of the deployment's ``spec``."""
    draining: int = 0
    """Number of replicas that end after their current sequences."""
    standby: int = 0
    """Number of replicas that keep their machines and processes, without weights, until the next request."""
    waiting: int = 0
    """Number of sequences that wait for a replica."""
    reason: str
    """Reason for the wanted number."""


class DeploymentView(DeploymentRecord):
    """A deployment and its replicas."""

    replicas: ReplicaCounts | None
    """Replica counts; null if the deployment is not served now."""


class ReplicasRequest(StrictModel):
    """New number or range of replicas of a live deployment."""

    model_config = example(replicas={"min": 0, "max": 4})

    replicas: Replicas
    """A number, or a range in which the number follows the load. Omitted fields of the range do not change."""


class DeploymentPage(ResponseBody):
    """Page of deployments, newest first."""

    deployments: list[DeploymentView]
    next_cursor: str | None
    """Cursor of the next page; null on the last page."""


class DeploymentStatus(ResponseBody):
    """Current status of a deployment."""

    replicas: tuple[ServingStatus, ...]
    """Status of each replica that has reported one."""


class EventPage(ResponseBody):
    """Page of events, oldest first."""

    events: list[EventRecord]
    next_after: int
    """Value of ``after`` for the next page."""

    @classmethod
    def of(cls, events: list[EventRecord], after: int) -> Self:
        """Return a page with ``events``, the events that follow number ``after``."""
        return cls(events=events, next_after=events[-1].seq if events else after)


class JobMetrics(ResponseBody):
    """Metrics of a job's steps."""

    metrics: list[MetricRecord]


class CheckpointEntry(ResponseBody):
    """A complete checkpoint of a job on disk."""

    step: int
    """Last step that the checkpoint contains."""
    size_bytes: int
    saved_at: datetime


class CheckpointList(ResponseBody):
    """A job's checkpoints, oldest first."""

    checkpoints: list[CheckpointEntry]


class ArtifactList(ResponseBody):
    """Artifacts of a job."""

    artifacts: list[ArtifactRecord]


class FileEntry(ResponseBody):
    """One file of an artifact."""

    path: str
    """Path relative to the artifact, with forward slashes."""
    size_bytes: int


class ArtifactFiles(ResponseBody):
    """One artifact and its files."""

    artifact: ArtifactRecord
    files: list[FileEntry]


class ContributorList(ResponseBody):
    """Page of machines, in the order they joined."""

    contributors: list[ContributorRecord]
    next_cursor: str | None
    """Cursor of the next page; null on the last page."""


class InviteList(ResponseBody):
    """Invites, newest first."""

    invites: list[InviteView]


class UploadRequest(StrictModel):
    """Request for a new upload."""

    model_config = example(name="corpus", kind="data")

    name: PlainText = Field(min_length=1, max_length=200)
    """Human-readable name."""
    kind: UploadKind
    """Kind of the upload; determines how the upload is checked at its completion."""


class UploadFile(ResponseBody):
    """One complete file of an upload."""

    path: str
    """Path relative to the upload, with forward slashes."""
    size_bytes: int
    sha256: str
    """SHA-256 of the file, in hexadecimal."""


class UploadView(ResponseBody):
    """Uploaded data, model or tokenizer. Jobs name an upload as ``upload:ID``, and one file as ``upload:ID/PATH``."""

    id: str
    owner: str | None = None
    """Id of the API key that made the upload; null for uploads of earlier versions, which belong to admins."""
    name: str
    kind: UploadKind
    state: Literal["open", "complete"]
    """open: files may still arrive, and no job can name the upload. complete: jobs can name it."""
    created_at: datetime
    completed_at: datetime | None = None
    size_bytes: int = 0
    files: list[UploadFile] = Field(default=[])
    """Complete files, in the order of their paths."""
    folder: str
    """Folder of the upload on the server."""


class UploadList(ResponseBody):
    """Uploads, newest first, and the limits of uploads."""

    uploads: list[UploadView]
    used_bytes: int
    """Size of all uploads of all keys, including files that are being received."""
    limit_bytes: int
    """Maximum size of all uploads together."""
    upload_limit_bytes: int
    """Maximum size of one upload."""
    data_suffixes: list[str]
    """Suffixes of files that an upload of data may contain, such as ``.txt``."""


class FieldProblem(ResponseBody):
    """Error of one field."""

    field: str
    """Path of the field, with dots; empty if the error names no field."""
    problem: str


class SpecCheck(ResponseBody):
    """Errors that submitting a job or deployment would cause."""

    kind: Kind | None
    """Kind of the job or deployment; null if parsing the specification fails."""
    problems: list[FieldProblem]
    """Errors; empty if the specification would be accepted."""
    hint: str | None = None
    """Action that the caller can take."""


class TaskPreview(ResponseBody):
    """First rows of the data of one task."""

    task: str | None = None
    """Name of the task; null without ``tasks``."""
    data: DataPreview


class JobPreview(ResponseBody):
    """First rows of the data of a training job, as training would read them."""

    tasks: list[TaskPreview]
    """One preview for each task; a job without ``tasks`` has one."""


class ServingRequest(StrictModel):
    """Requests that users will send to the trained model; the planner predicts how the same machines serve them."""

    model_config = ConfigDict(allow_inf_nan=False)

    objective: Objective = "latency"
    """latency: shortest time of a single request. throughput: most tokens per second within the limits."""
    prompt_tokens: int = Field(default=512, ge=1, le=2**24)
    new_tokens: int = Field(default=128, ge=1, le=2**24)
    concurrent: int = Field(default=16, ge=1, le=2**20)
    """Maximum number of sequences that are generated at the same time; the planner reserves their KV cache."""
    first_token_limit_s: float | None = Field(default=None, gt=0)
    """Maximum time to the first token; for objective throughput."""
    next_token_limit_s: float | None = Field(default=None, gt=0)
    """Maximum time between two tokens; for objective throughput."""

    def workload(self, ranks: int) -> ServingWorkload:
        """Return the planner's input for members of this number of processes (``parallelism.tensor`` of the job)."""
        return ServingWorkload(**self.model_dump(), ranks=ranks)


class PlanRequest(StrictModel):
    """Request for the plan that a job would get; the job is not queued."""

    job: TrainJob
    """Job as it would be submitted; the planner does not read the job's data."""
    topology: TopologyDocument | None = None
    """Machines to plan on; default: the machines that are ready now."""
    strategy: str | None = Field(default=None, max_length=100)
    """Strategy that replaces the job's own; null keeps the job's own strategy."""
    compare: bool = False
    """Whether to report the outcome of every other strategy too."""
    serving: ServingRequest | None = None
    """Expected requests to the trained model; if given, the report contains a serving prediction."""

    @field_validator("job", mode="before")
    @classmethod
    def _job_says_what_is_wrong(cls, value: Any) -> Any:
        return parse_job(value) if isinstance(value, dict) else value

    @field_validator("topology", mode="before")
    @classmethod
    def _topology_is_one(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, TopologyDocument) else check_kind(value)
