"""Requests to the REST API for both clients; each is described once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from share_compute.files.topology_file import TopologyDocument
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.planning.report import PlanReport
from share_compute.scopes import Scope
from share_compute.specification import Kind, ServeJob, TrainJob
from share_compute.store.records import (
    ApiKeyRecord,
    ArtifactRecord,
    ContributorRecord,
    JobRecord,
    MetricRecord,
    QueuedJob,
)
from share_compute_api.client.calls import ApiCall, call, path_part, request
from share_compute_api.client.job_file import Submission, job_body
from share_compute_api.schemas.bodies import (
    Alert,
    AlertList,
    ArtifactFiles,
    ArtifactList,
    CheckpointEntry,
    CheckpointList,
    ContributorList,
    DeploymentPage,
    DeploymentStatus,
    DeploymentView,
    EventPage,
    FailureMade,
    Health,
    InviteCreated,
    InviteList,
    InviteView,
    JobMetrics,
    JobPage,
    JobPreview,
    KeyCreated,
    KeyList,
    PlanRequest,
    QueueView,
    ServingRequest,
    SignInCode,
    Status,
    TokenRotated,
    UploadList,
    UploadView,
)
from share_compute_api.schemas.catalogue import CatalogueView
from share_compute_api.schemas.cluster import ClusterView
from share_compute_api.schemas.frames import RecordList
from share_compute_api.schemas.labels import JobComparison
from share_compute_api.schemas.layout import WeightLayout
from share_compute_api.schemas.retention import Deleted, PruneReport
from share_compute_api.schemas.rounds import RoundsView
from share_compute_api.schemas.sweeps import SweepView
from share_compute_api.schemas.utilization import ClusterUtilization

_SUBMIT_TIMEOUT_S = 300.0
"""Timeout for a submission, in seconds: the server may build the model in an isolated process to check it."""
_PLAN_TIMEOUT_S = 300.0
"""Timeout for a plan, in seconds; longer than the server's own limit of 240 s."""
_EXPORT_TIMEOUT_S = 3600.0
_ROTATION_S = 600.0


class ApiRequests:
    """Methods of a client that send one request each.

    They return results in `Client`, and awaitables in `AsyncClient`. They raise the `ShareComputeError` that the server
    sent, or `Unavailable` if the server does not answer.
    """

    # The server

    @request
    def health(self) -> ApiCall[Health]:
        """Return the server's health and clock; needs no key."""
        return call(Health, "GET", "/health")

    @request
    def sign_in_code(self) -> ApiCall[SignInCode]:
        """Create a link that signs a browser in to the dashboard; the link works once, within 15 minutes."""
        return call(SignInCode, "POST", "/session/codes")

    @request
    def status(self) -> ApiCall[Status]:
        """Return an overview of the server and its machines."""
        return call(Status, "GET", "/status")

    @request
    def schema(self, kind: Kind = "train") -> ApiCall[dict[str, Any]]:
        """Return the JSON schema of a job, or of a deployment, of this kind; needs no key."""
        return ApiCall("GET", "/schemas/job", {"params": {"kind": kind}}, json.loads)

    # Jobs

    @request
    def jobs(
        self,
        *,
        state: Sequence[JobState] = (),
        kind: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        group: str | None = None,
        trials: bool = False,
        limit: int = 50,
        cursor: str | None = None,
    ) -> ApiCall[JobPage]:
        """Return a page of jobs, newest first; trials only if requested. Pass ``next_cursor`` to get the next page."""
        wanted = {"kind": kind, "name": name, "cursor": cursor, "tag": tags, "group": group, "trials": trials}
        params = {key: value for key, value in {**wanted, "limit": limit}.items() if value}
        return call(JobPage, "GET", "/jobs", params={**params, "state": [*map(str, state)]})

    @request
    def submit(self, job: Submission, *, idempotency_key: str | None = None) -> ApiCall[JobRecord]:
        """Queue a job.

        Args:
            job: a job of any kind, a mapping, or YAML text. Paths in it are paths on the server.
            idempotency_key: with the same key, a repeated submission returns the existing job and queues no second one.
        """
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        content, content_type = job_body(job)
        return call(
            JobRecord, "POST", "/jobs", headers=headers | content_type, timeout=_SUBMIT_TIMEOUT_S, **content
        )

    @request
    def job(self, job_id: str) -> ApiCall[JobRecord]:
        """Return one job."""
        return call(JobRecord, "GET", f"/jobs/{path_part(job_id)}")

    @request
    def label(self, /, job_id: str, **labels: Any) -> ApiCall[JobRecord]:
        """Change ``tags``, ``group`` or ``note`` of a job."""
        return call(JobRecord, "PATCH", f"/jobs/{path_part(job_id)}", json=labels)

    @request
    def compare(self, job_ids: Sequence[str]) -> ApiCall[JobComparison]:
        """Return results of several jobs, and the fields in which their job files differ."""
        return call(JobComparison, "GET", "/jobs/compare", params={"job": list(job_ids)})

    @request
    def trials(self, job_id: str) -> ApiCall[SweepView]:
        """Return the trials of a sweep, best first."""
        return call(SweepView, "GET", f"/jobs/{path_part(job_id)}/trials")

    @request
    def rounds(self, job_id: str) -> ApiCall[RoundsView]:
        """Return the last rounds of a training job, oldest first."""
        return call(RoundsView, "GET", f"/jobs/{path_part(job_id)}/rounds")

    @request
    def cancel(self, job_id: str) -> ApiCall[JobRecord]:
        """Cancel a queued job, or ask a running job to stop."""
        return call(JobRecord, "POST", f"/jobs/{path_part(job_id)}/cancel")

    @request
    def delete_job(self, job_id: str, *, cancel: bool = False) -> ApiCall[Deleted]:
        """Delete a finished job and its data; with ``cancel``, stop an unfinished job and delete it afterwards."""
        params = {"cancel": True} if cancel else {}
        return call(Deleted, "DELETE", f"/jobs/{path_part(job_id)}", params=params)

    @request
    def delete_artifact(self, job_id: str, name: str) -> ApiCall[Deleted]:
        """Delete one artifact of a job."""
        return call(Deleted, "DELETE", f"/jobs/{path_part(job_id)}/artifacts/{path_part(name)}")

    @request
    def delete_deployment(self, key: str) -> ApiCall[Deleted]:
        """Delete the record of a stopped or failed deployment, by its id or its name."""
        return call(Deleted, "DELETE", f"/deployments/{path_part(key)}/history")

    @request
    def prune(self, *, dry_run: bool = False) -> ApiCall[PruneReport]:
        """Delete records and files past their retention time; with ``dry_run`` only list them."""
        return call(PruneReport, "POST", "/prune", params={"dry_run": dry_run})

    @request
    def make_failure(
        self, job_id: str, kind: Literal["kill", "stop"], contributor_id: str, *, duration_s: float = 0.0
    ) -> ApiCall[FailureMade]:
        """Inject a fault into a member of a running job.

        Args:
            job_id: the job.
            kind: ``kill`` ends the member's process, ``stop`` suspends it.
            contributor_id: machine on which the member runs.
            duration_s: time for which the process is suspended, in seconds.

        Raises:
            UserError: the server does not allow fault injection.
            Conflict: the job is not running, or no member runs on that machine now.
        """
        body = {"kind": kind, "contributor_id": contributor_id, "duration_s": duration_s}
        return call(FailureMade, "POST", f"/jobs/{path_part(job_id)}/failures", json=body)

    @request
    def resume(self, job_id: str) -> ApiCall[JobRecord]:
        """Queue a failed or cancelled job again; it continues from its last checkpoint or finished rows, if any."""
        return call(JobRecord, "POST", f"/jobs/{path_part(job_id)}/resume")

    @request
    def events(
        self, job_id: str, *, after: int = 0, limit: int = 500, without: Sequence[str] = ()
    ) -> ApiCall[EventPage]:
        """Return a page of a job's events with numbers above ``after``, except events of the kinds in ``without``."""
        params = {"after": after, "limit": limit, "without": [*without]}
        return call(EventPage, "GET", f"/jobs/{path_part(job_id)}/events", params=params)

    @request
    def metrics(self, job_id: str, *, after_step: int = 0) -> ApiCall[RecordList[MetricRecord]]:
        """Return the metrics of the steps after ``after_step``."""
        params = {"after_step": after_step}
        return call(JobMetrics, "GET", f"/jobs/{path_part(job_id)}/metrics", params=params).then(
            lambda answer: RecordList(answer.metrics)
        )

    # Serving

    @request
    def deploy(self, deployment: ServeJob | dict[str, Any]) -> ApiCall[DeploymentView]:
        """Serve a model.

        Args:
            deployment: a `ServeJob` or a mapping. Paths in it are paths on the server.

        Raises:
            Conflict: a deployment with this name is up.
        """
        body = deployment.model_dump(mode="json") if isinstance(deployment, ServeJob) else deployment
        return call(DeploymentView, "POST", "/deployments", json=body, timeout=_SUBMIT_TIMEOUT_S)

    @request
    def deployments(
        self, *, state: Sequence[DeploymentState] = (), limit: int = 50, cursor: str | None = None
    ) -> ApiCall[DeploymentPage]:
        """Return a page of deployments in the given states (default: those that are up), newest first."""
        params: dict[str, Any] = {"state": [one.value for one in state], "limit": limit}
        params |= {"cursor": cursor} if cursor else {}
        return call(DeploymentPage, "GET", "/deployments", params=params)

    @request
    def models(self) -> ApiCall[CatalogueView]:
        """Return the models that the caller may serve; new ones may be pending."""
        return call(CatalogueView, "GET", "/catalogue")

    @request
    def deployment(self, key: str) -> ApiCall[DeploymentView]:
        """Return one deployment, by its id or its name."""
        return call(DeploymentView, "GET", f"/deployments/{path_part(key)}")

    @request
    def deployment_status(self, key: str) -> ApiCall[DeploymentStatus]:
        """Return the current status of each replica of a deployment, by the deployment's id or name."""
        return call(DeploymentStatus, "GET", f"/deployments/{path_part(key)}/status")

    @request
    def scale(self, key: str, replicas: int | str | dict[str, Any]) -> ApiCall[DeploymentView]:
        """Set the number or range of replicas of a deployment that is up, by its id or its name.

        Args:
            key: id or name.
            replicas: e.g. 3, ``0..4``, or fields of a `ReplicasSpec`.

        Raises:
            Conflict: the deployment has ended.
        """
        path = f"/deployments/{path_part(key)}"
        return call(DeploymentView, "PATCH", path, json={"replicas": replicas})

    @request
    def undeploy(self, key: str) -> ApiCall[DeploymentView]:
        """Take a deployment down, by its id or its name."""
        return call(DeploymentView, "DELETE", f"/deployments/{path_part(key)}")

    # Planning

    @request
    def preview_data(self, job: TrainJob | dict[str, Any]) -> ApiCall[JobPreview]:
        """Return the first rows of a job's data, as training would read them; paths are paths on the server."""
        body = job.model_dump(mode="json") if isinstance(job, TrainJob) else job
        return call(JobPreview, "POST", "/jobs/preview", json=body)

    @request
    def plan(
        self,
        job: TrainJob | dict[str, Any],
        *,
        topology: TopologyDocument | None = None,
        strategy: str | None = None,
        compare: bool = False,
        serving: ServingRequest | None = None,
    ) -> ApiCall[PlanReport]:
        """Return the plan that a job would get, with reasons; nothing is queued.

        Args:
            job: a `TrainJob` or a mapping. Paths in it are paths on the server.
            topology: the machines; default: those that are ready now.
            strategy: strategy that replaces the job's own.
            compare: whether to report the outcomes of the other strategies too.
            serving: requests that users will send to the trained model; the report then predicts how they are served.

        Raises:
            PlanInfeasible: the machines cannot hold the job, or there are none.
        """
        body = PlanRequest.model_validate(
            {"job": job, "topology": topology, "strategy": strategy, "compare": compare, "serving": serving}
        )
        return call(PlanReport, "POST", "/plans", json=body.model_dump(mode="json"), timeout=_PLAN_TIMEOUT_S)

    @request
    def topology(self) -> ApiCall[TopologyDocument]:
        """Return the ready machines with their measured speeds and links."""
        return call(TopologyDocument, "GET", "/topology")

    # Artifacts

    @request
    def artifacts(self, job_id: str) -> ApiCall[list[ArtifactRecord]]:
        """Return the artifacts of a job: its finished results."""
        return call(ArtifactList, "GET", f"/jobs/{path_part(job_id)}/artifacts").then(
            lambda answer: answer.artifacts
        )

    @request
    def artifact(self, job_id: str, name: str) -> ApiCall[ArtifactFiles]:
        """Return one artifact of a job and the list of its files."""
        path = f"/jobs/{path_part(job_id)}/artifacts/{path_part(name)}"
        return call(ArtifactFiles, "GET", path)

    @request
    def layout(
        self, job_id: str, source: str | int, pattern: str | None = None, limit: int | None = None
    ) -> ApiCall[WeightLayout]:
        """Return where the weights of an artifact (its name) or of a checkpoint (its step) are; see `LayoutQuery`."""
        query = {"pattern": pattern, "limit": limit}
        part = f"artifacts/{path_part(source)}" if isinstance(source, str) else f"checkpoints/{source}"
        params = {name: value for name, value in query.items() if value is not None}
        return call(WeightLayout, "GET", f"/jobs/{path_part(job_id)}/{part}/layout", params=params)

    @request
    def checkpoints(self, job_id: str) -> ApiCall[list[CheckpointEntry]]:
        """Return the checkpoints of a job that are on the server's disk, oldest first."""
        return call(CheckpointList, "GET", f"/jobs/{path_part(job_id)}/checkpoints").then(
            lambda answer: answer.checkpoints
        )

    @request
    def export(self, job_id: str, step: int) -> ApiCall[ArtifactRecord]:
        """Export a checkpoint of a job as an artifact: a Hugging Face folder, or adapters."""
        path = f"/jobs/{path_part(job_id)}/checkpoints/{step}/export"
        return call(ArtifactRecord, "POST", path, timeout=_EXPORT_TIMEOUT_S)

    @request
    def alerts(self) -> ApiCall[list[Alert]]:
        """Return the current alerts: errors first, then by start time, newest first."""
        return call(AlertList, "GET", "/alerts").then(lambda answer: answer.alerts)

    @request
    def queue(self) -> ApiCall[list[QueuedJob]]:
        """Return the queued jobs, in the order in which they were submitted."""
        return call(QueueView, "GET", "/queue").then(lambda answer: answer.jobs)

    # Uploads

    @request
    def uploads(self) -> ApiCall[UploadList]:
        """Return the caller's uploads (for an admin, all), newest first, with the used and the allowed space."""
        return call(UploadList, "GET", "/uploads")

    @request
    def remove_upload(self, upload_id: str) -> ApiCall[UploadView]:
        """Remove an upload; raise Conflict if an unfinished job or a deployment uses it."""
        return call(UploadView, "DELETE", f"/uploads/{path_part(upload_id)}")

    # Keys, invites and contributors

    @request
    def create_key(self, name: str, scopes: Sequence[Scope] = (Scope.chat,)) -> ApiCall[KeyCreated]:
        """Create an API key with these scopes; only this response contains the key."""
        body = {"name": name, "scopes": [scope.value for scope in scopes]}
        return call(KeyCreated, "POST", "/keys", json=body)

    @request
    def api_keys(self) -> ApiCall[list[ApiKeyRecord]]:
        """Return all API keys, oldest first, without the keys themselves."""
        return call(KeyList, "GET", "/keys").then(lambda answer: answer.keys)

    @request
    def own_key_id(self) -> ApiCall[str]:
        """Return the id of the API key that this client sends."""
        return call(KeyList, "GET", "/keys").then(lambda answer: answer.caller_id)

    @request
    def revoke_key(self, key_id: str) -> ApiCall[ApiKeyRecord]:
        """Revoke an API key."""
        return call(ApiKeyRecord, "DELETE", f"/keys/{path_part(key_id)}")

    @request
    def create_invite(
        self,
        label: str | None = None,
        expires_in_s: float = 3600,
        *,
        uses: int = 1,
        memory_bytes: int | None = None,
    ) -> ApiCall[InviteCreated]:
        """Create an invite; only this response contains its code.

        Args:
            label: person or purpose of the invite.
            expires_in_s: validity, in seconds.
            uses: number of machines that may join with it.
            memory_bytes: largest memory that each of these machines may lend; default: no limit.
        """
        body = {"label": label, "expires_in_s": expires_in_s, "uses": uses, "memory_bytes": memory_bytes}
        return call(InviteCreated, "POST", "/invites", json=body)

    @request
    def invites(self) -> ApiCall[list[InviteView]]:
        """Return all invites, newest first."""
        return call(InviteList, "GET", "/invites").then(lambda answer: answer.invites)

    @request
    def revoke_invite(self, invite_id: str) -> ApiCall[InviteView]:
        """Revoke an invite."""
        return call(InviteView, "DELETE", f"/invites/{path_part(invite_id)}")

    @request
    def contributors_page(
        self, *, state: Sequence[ContributorState] = (), cursor: str | None = None
    ) -> ApiCall[ContributorList]:
        """Return a page of the machines in these states, in order of joining; see `contributors`."""
        params: dict[str, Any] = {"state": [one.value for one in state]} if state else {}
        params |= {"cursor": cursor} if cursor else {}
        return call(ContributorList, "GET", "/contributors", params=params)

    @request
    def cluster(self) -> ApiCall[ClusterView]:
        """Return summaries of the machines with their work, and the islands of machines that are near each other."""
        return call(ClusterView, "GET", "/cluster")

    @request
    def utilization(self) -> ApiCall[ClusterUtilization]:
        """Return the present utilization of the machines that reported in the last minute."""
        return call(ClusterUtilization, "GET", "/cluster/utilization")

    @request
    def contributor(self, contributor_id: str) -> ApiCall[ContributorRecord]:
        """Return one machine."""
        return call(ContributorRecord, "GET", f"/contributors/{path_part(contributor_id)}")

    @request
    def remove_contributor(
        self, contributor_id: str, *, keep_token: bool = False
    ) -> ApiCall[ContributorRecord]:
        """Ask a machine, with all devices of its host, to hand over its work and leave.

        The cluster's token is then replaced, unless ``keep_token`` is set.
        """
        path, params = f"/contributors/{path_part(contributor_id)}", {"keep_token": keep_token}
        return call(ContributorRecord, "DELETE", path, params=params)

    @request
    def rotate_token(self) -> ApiCall[TokenRotated]:
        """Replace the cluster's token; return when the Ray head uses the new one, which can take minutes."""
        return call(TokenRotated, "POST", "/cluster/token", timeout=_ROTATION_S)

    @request
    def measure_contributor(self, contributor_id: str) -> ApiCall[ContributorRecord]:
        """Request that a machine be measured again when it is idle; return the machine's current record."""
        return call(ContributorRecord, "POST", f"/contributors/{path_part(contributor_id)}/measurement")

    @request
    def clear_contributor(self, contributor_id: str) -> ApiCall[ContributorRecord]:
        """End the quarantine of a machine, so that it gets work again."""
        return call(ContributorRecord, "DELETE", f"/contributors/{path_part(contributor_id)}/quarantine")
