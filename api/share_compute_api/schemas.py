"""Bodies of the REST API beyond the store's records. Free of FastAPI: the client uses them too."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from share_compute.jobs.states import ContributorState, JobState
from share_compute.plain_text import PlainText
from share_compute.planning.workload import Objective, ServingWorkload
from share_compute.scopes import GRANTABLE, Scope
from share_compute.serving.status import ServingStatus
from share_compute.specification import Kind, Replicas, TrainJob, parse_job
from share_compute.store.records import (
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
from share_compute.strict import StrictModel
from share_compute.topology_file import TopologyDocument, check_kind
from share_compute_api.choices import UploadKind
from share_compute_api.join_line import INSTALL_COMMAND

MOMENT = "2026-01-31T12:00:00Z"
"""Time in examples."""


class View(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


def example(**values: Any) -> ConfigDict:
    """Return the configuration of a body with one example of it in the OpenAPI document."""
    return ConfigDict(json_schema_extra={"examples": [values]})


class FailureRequest(StrictModel):
    """What is to go wrong with a member of a running job."""

    model_config = example(kind="stop", contributor_id="c-0a1b2c", duration_s=5.0)

    kind: Literal["kill", "stop"]
    """kill: its process ends at once. stop: it stands still for a while, with its sockets open."""
    contributor_id: str = Field(max_length=100)
    """Machine that it runs on."""
    duration_s: float = Field(default=0.0, ge=0, le=3600)
    """How long it stands still."""

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        if (self.kind == "stop") != (self.duration_s > 0):
            raise ValueError("duration_s is for stop, which needs it")
        return self


class FailureMade(View):
    """What went wrong."""

    kind: Literal["kill", "stop"]
    contributor_id: str
    at: datetime
    """When the member was told."""


class Versions(StrictModel):
    """Versions that must fit between the machines of a pool."""

    model_config = example(python="3.11.7", ray="2.60.0", torch="2.13.0", share_compute="0.1.0")

    python: str
    """Must be equal to the patch: Ray pickles between interpreters."""
    ray: str
    """Must be equal."""
    torch: str
    """Must be equal in its first two numbers: kernels differ between them."""
    share_compute: str
    """Must be equal in its first two numbers."""


class Health(View):
    """Whether the server answers, and what its clock says. Anybody may ask, so it says no more."""

    status: Literal["ok"] = "ok"
    time: datetime
    """The server's clock, in UTC."""


class Status(View):
    """The pool at a glance."""

    url: str
    data_folder: str | None = None
    """null for keys without the scope ``admin``."""
    data_roots: tuple[str, ...]
    """Folders of the server below which jobs may name files; empty where data comes by uploads alone."""
    database: Literal["sqlite", "postgresql"]
    has_cluster: bool
    """Whether machines can join and jobs can run."""
    ray_address: str | None = None
    """host:port of the Ray head; none without a cluster, and for keys without the scope ``admin``."""
    versions: Versions
    started_at: datetime
    disk_free_bytes: int
    """Of the disk that the data folder is on."""
    contributors: dict[ContributorState, int]
    jobs: dict[JobState, int]


class Alert(View):
    """Something that an operator should know of, for as long as it is so."""

    id: str
    """The same as long as it is the same trouble."""
    kind: Literal[
        "no-cluster",
        "disk",
        "machine-lost",
        "machine-silent",
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
    """error: something does not work. warning: something may soon not."""
    text: str
    """What is the matter, in one sentence."""
    mend: str | None = None
    """What the operator can do about it."""
    since: datetime | None = None
    """When it began; null where nobody wrote that down."""
    job_id: str | None = None
    contributor_id: str | None = None
    deployment_id: str | None = None


class AlertList(View):
    """All that is the matter now: errors first, then the latest first."""

    alerts: list[Alert]


class QueueView(View):
    """Jobs that wait, in the order they came."""

    jobs: list[QueuedJob]


class SignInRequest(StrictModel):
    """A key, or a code of a sign-in link, in exchange for a session."""

    model_config = example(key="sck_...")

    key: str | None = Field(default=None, min_length=1, max_length=200)
    """An API key."""
    code: str | None = Field(default=None, min_length=1, max_length=200)
    """A code that was made for one sign-in."""

    @model_validator(mode="after")
    def _has_one(self) -> SignInRequest:
        if (self.key is None) == (self.code is None):
            raise ValueError("give a key or a code")
        return self


class SignInCode(View):
    """Signs one browser in, once."""

    model_config = example(code="Zm9v...", url="https://192.0.2.1:8700/#code=Zm9v...", expires_at=MOMENT)

    code: str
    url: str
    """Opens the dashboard signed in; a browser does not send the part after # to anybody."""
    expires_at: datetime


class SessionView(View):
    """Who is signed in."""

    key: ApiKeyRecord | None
    """The key that the session stands for; null where nobody is signed in."""
    expires_at: datetime | None
    """When the session ends unless it is renewed, which asking for it does."""
    last_event: int | None
    """Number of the newest event: a stream that begins there leaves out nothing of what is asked for from now on."""


def _grantable(scope: Scope) -> Scope:
    if scope not in GRANTABLE:
        raise ValueError(f"{scope} is what the key of a joined machine holds; an API key cannot be given it")
    return scope


GrantedScope: TypeAlias = Annotated[Scope, AfterValidator(_grantable)]


class KeyRequest(StrictModel):
    """A new API key."""

    model_config = example(name="Ada's scripts", scopes=["submit"])

    name: PlainText = Field(min_length=1, max_length=200)
    """For whom or what it is."""
    scopes: tuple[GrantedScope, ...] = Field(default=(Scope.chat,), min_length=1, max_length=len(GRANTABLE))
    """What it may do: ``submit`` includes ``read`` and ``chat``, ``admin`` includes all."""


class KeyCreated(View):
    """The only answer that ever shows the key."""

    model_config = example(id="key-k3v7q2ma", name="Ada's scripts", scopes=["submit"], key="sck_...")

    id: str
    name: str
    scopes: tuple[Scope, ...]
    key: str
    """Send it as ``Authorization: Bearer KEY``."""


class KeyList(View):
    """API keys, oldest first."""

    keys: list[ApiKeyRecord]
    caller_id: str
    """Id of the key that this request was made with."""


class InviteRequest(StrictModel):
    """A new invite."""

    model_config = example(label="laptops of Ada", expires_in_s=3600, uses=2)

    label: PlainText | None = Field(default=None, max_length=200)
    """For whom or what it is."""
    expires_in_s: float = Field(default=3600, gt=0, le=366 * 24 * 3600)
    """Seconds that it works for."""
    uses: int = Field(default=1, ge=1, le=10_000)
    """Machines that may join with it."""
    memory_bytes: int | None = Field(default=None, ge=1, le=2**63 - 1)
    """Most memory that each of them may lend; null: no limit."""


class InviteView(InviteRecord):
    """An invite and whether it still works."""

    state: InviteState
    machines: tuple[str, ...] = ()
    """Names of the contributors that joined with it, in the order they joined."""


class InviteCreated(View):
    """The only answer that ever shows the code."""

    model_config = example(
        id="inv-k3v7q2ma",
        code="abcd-efgh-ijkl-mnop",
        expires_at=MOMENT,
        join_command="SHARE_COMPUTE_INVITE=abcd-efgh-ijkl-mnop share-compute join https://192.0.2.1:8700",
    )

    id: str
    code: str
    """With the fingerprint of the server's key behind a dot, if clients are to know the server by it."""
    expires_at: datetime
    uses: int = 1
    """Machines that may join with it."""
    join_command: str
    """To paste on the machine that is to join; arguments could be read by its other users, the environment cannot."""
    install_command: str = INSTALL_COMMAND
    """To run there before, if share-compute is not installed."""


class TokenRotated(View):
    """The cluster has another token."""

    jobs: int
    """Jobs that were suspended; they continue from the checkpoint that they wrote."""
    seconds: float
    """Time from the first suspension until the head ran with the new token."""


class JobPage(View):
    """Jobs, newest first."""

    jobs: list[JobRecord]
    next_cursor: str | None
    """Where the next page begins; null on the last one."""


class ReplicaCounts(View):
    """How many replicas a deployment has, and is to have."""

    ready: int
    """Those that answer."""
    wanted: int
    """As many as what is asked of it needs, within the range of its ``spec``."""
    leaving: int = 0
    """Those that end their sequences, and then go."""
    waiting: int = 0
    """Sequences that wait for a replica that answers."""
    reason: str
    """Why so many are wanted."""


class DeploymentView(DeploymentRecord):
    """A deployment and its replicas."""

    replicas: ReplicaCounts | None
    """null where nothing serves it now."""


class ReplicasRequest(StrictModel):
    """What is to change of a deployment that is up."""

    model_config = example(replicas={"min": 0, "max": 4})

    replicas: Replicas
    """A number, or a range in which it follows what is asked of it. Of its fields those that are left out stay."""


class DeploymentPage(View):
    """Deployments, newest first."""

    deployments: list[DeploymentView]
    next_cursor: str | None
    """Where the next page begins; null on the last one."""


class DeploymentStatus(View):
    """How a deployment does now."""

    replicas: tuple[ServingStatus, ...]
    """Those that told how they are."""


class EventPage(View):
    """Events in order."""

    events: list[EventRecord]
    next_after: int
    """Pass it as ``after`` to read on."""

    @classmethod
    def of(cls, events: list[EventRecord], after: int) -> Self:
        """Return the page of the events that followed number ``after``."""
        return cls(events=events, next_after=events[-1].seq if events else after)


class Metrics(View):
    """What a job's steps measured."""

    metrics: list[MetricRecord]


class CheckpointEntry(View):
    """A checkpoint of a job that is on disk, whole."""

    step: int
    """The last one that is in it."""
    size_bytes: int
    saved_at: datetime


class CheckpointList(View):
    """A job's checkpoints, oldest first."""

    checkpoints: list[CheckpointEntry]


class ArtifactList(View):
    """A job's finished results."""

    artifacts: list[ArtifactRecord]


class FileEntry(View):
    """One file of an artifact."""

    path: str
    """Relative to the artifact, with forward slashes."""
    size_bytes: int


class ArtifactFiles(View):
    """One artifact and its files."""

    artifact: ArtifactRecord
    files: list[FileEntry]


class ContributorList(View):
    """Machines in the order they joined."""

    contributors: list[ContributorRecord]
    next_cursor: str | None
    """Where the next page begins; null on the last one."""


class InviteList(View):
    """Invites, newest first."""

    invites: list[InviteView]


class UploadRequest(StrictModel):
    """A new upload."""

    model_config = example(name="corpus", kind="data")

    name: PlainText = Field(min_length=1, max_length=200)
    """What people call it."""
    kind: UploadKind
    """What it is looked at as, when it is completed."""


class UploadFile(View):
    """One file of an upload, whole."""

    path: str
    """Relative to the upload, with forward slashes."""
    size_bytes: int
    sha256: str
    """In hexadecimal."""


class UploadView(View):
    """Data or a model that somebody sent. A job names it as ``upload:ID``, and a file of it as ``upload:ID/PATH``."""

    id: str
    owner: str | None = None
    """Id of the API key that sent it; null for those of earlier versions, which belong to admins."""
    name: str
    kind: UploadKind
    state: Literal["open", "complete"]
    """open: files may arrive, and no job can name it."""
    created_at: datetime
    completed_at: datetime | None = None
    size_bytes: int = 0
    files: list[UploadFile] = []
    """By their paths."""
    folder: str
    """Where it lies on the server."""


class UploadList(View):
    """Uploads, newest first."""

    uploads: list[UploadView]
    used_bytes: int
    """What all of them take, with what is on its way."""
    limit_bytes: int
    """The most that all of them together may take."""
    upload_limit_bytes: int
    """The most that one of them may take."""


class FieldProblem(View):
    """What is wrong with one field."""

    field: str
    """Its path with dots; empty where it concerns the whole."""
    problem: str


class SpecCheck(View):
    """What submitting a job, or making a deployment, would say."""

    kind: Kind | None
    """What it is; null where even that is wrong."""
    problems: list[FieldProblem]
    """None where it would be taken."""
    mend: str | None = None
    """What can be done about them."""


class ServingRequest(StrictModel):
    """What the same machines would be asked for by users of the model."""

    model_config = ConfigDict(allow_inf_nan=False)

    objective: Objective = "latency"
    """Shortest time of one request alone, or most tokens a second within the limits."""
    prompt_tokens: int = Field(default=512, ge=1, le=2**24)
    new_tokens: int = Field(default=128, ge=1, le=2**24)
    concurrent: int = Field(default=16, ge=1, le=2**20)
    """Most sequences that are generated at one time; their cache is reserved."""
    first_token_limit_s: float | None = Field(default=None, gt=0)
    """Longest wait for the first token; for objective throughput."""
    next_token_limit_s: float | None = Field(default=None, gt=0)
    """Longest wait for each token after it; for objective throughput."""

    def workload(self) -> ServingWorkload:
        """Return what the planner reads."""
        return ServingWorkload(**self.model_dump())


class PlanRequest(StrictModel):
    """A dry run: which plan would this job get on these machines, and why?"""

    job: TrainJob
    """As it would be submitted. Its data is not looked at."""
    topology: TopologyDocument | None = None
    """The machines; default: those that are ready now."""
    strategy: str | None = Field(default=None, max_length=100)
    """In place of the job's own."""
    compare: bool = False
    """Tell what every other strategy would have made of it."""
    serving: ServingRequest | None = None
    """Tell, too, what the machines would do for requests."""

    @field_validator("job", mode="before")
    @classmethod
    def _job_says_what_is_wrong(cls, value: Any) -> Any:
        return parse_job(value) if isinstance(value, dict) else value

    @field_validator("topology", mode="before")
    @classmethod
    def _topology_is_one(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, TopologyDocument) else check_kind(value)
