"""The Python client of the control plane; the command line uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, connect_sse

from share_compute.files.series import SeriesFormat
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
    EventRecord,
    JobRecord,
    MetricRecord,
    QueuedJob,
)
from share_compute_api.client import chatting, downloads, sending
from share_compute_api.client.job_file import Submission
from share_compute_api.connection.backoff import ExponentialBackoff
from share_compute_api.connection.discovery import find_target
from share_compute_api.connection.transport import Transport, raise_for_problem
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
from share_compute_api.schemas.choices import UploadKind
from share_compute_api.schemas.cluster import ClusterView
from share_compute_api.schemas.labels import JobComparison
from share_compute_api.schemas.layout import WeightLayout
from share_compute_api.schemas.retention import Deleted, PruneReport
from share_compute_api.schemas.rounds import RoundsView
from share_compute_api.schemas.sweeps import SweepView

_READ_TIMEOUT_S = 30.0
"""Read timeout of a stream, in seconds; the server sends a keep-alive after 10 s without an event."""
_PAUSES_S = (0.1, 5.0)
"""First and longest delay before a stream is reopened, in seconds."""
_PLAN_TIMEOUT_S = 300.0
"""Timeout for a plan, in seconds; longer than the server's own limit of 240 s."""
_EXPORT_TIMEOUT_S = 3600.0
_ROTATION_S = 600.0


class Client:
    """Client of a control plane.

    The methods raise the `ShareComputeError` that the server sent, or `Unavailable` if the server does not answer.

    Args:
        url: URL of the server; default: the one in the settings, else that of this machine's server.
        api_key: API key; default: the one in the settings or, for this machine's server, in its data folder.
        fingerprint: fingerprint of the server's key; default: as for ``api_key``. Without a fingerprint, the
            certificate is verified against public certificate authorities.
        data_folder: data folder of this machine's server, if it is not the default one.
        timeout_s: longest wait for a connection or for the next bytes of a response, in seconds.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        fingerprint: str | None = None,
        data_folder: Path | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        target = find_target(url, api_key, data_folder, fingerprint)
        self._transport = Transport(target, timeout_s=timeout_s)
        self.url = self._transport.target.url

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The server

    def health(self) -> Health:
        """Return the server's health and clock; needs no key."""
        return self._transport.read(Health, "GET", "/health")

    def sign_in_code(self) -> SignInCode:
        """Create a link that signs a browser in to the dashboard; the link works once, within 15 minutes."""
        return self._transport.read(SignInCode, "POST", "/session/codes")

    def status(self) -> Status:
        """Return an overview of the server and its machines."""
        return self._transport.read(Status, "GET", "/status")

    def schema(self, kind: Kind = "train") -> dict[str, Any]:
        """Return the JSON schema of a job, or of a deployment, of this kind; needs no key."""
        return dict(self._transport.request("GET", "/schemas/job", params={"kind": kind}).json())

    # Jobs

    def submit(self, job: Submission, *, idempotency_key: str | None = None) -> JobRecord:
        """Queue a job.

        Args:
            job: a job of any kind, a mapping, or YAML text. Paths in it are paths on the server.
            idempotency_key: with the same key, a repeated submission returns the existing job and queues no second one.
        """
        return sending.submitted(self._transport, job, idempotency_key)

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
    ) -> JobPage:
        """Return a page of jobs, newest first; trials only if asked for. ``next_cursor`` gets the next page."""
        wanted = {"kind": kind, "name": name, "cursor": cursor, "tag": tags, "group": group, "trials": trials}
        params = {key: value for key, value in {**wanted, "limit": limit}.items() if value}
        return self._transport.read(JobPage, "GET", "/jobs", params={**params, "state": [*map(str, state)]})

    def job(self, job_id: str) -> JobRecord:
        """Return one job."""
        return self._transport.read(JobRecord, "GET", f"/jobs/{job_id}")

    def label(self, job_id: str, **labels: Any) -> JobRecord:
        """Change ``tags``, ``group`` or ``note`` of a job."""
        return self._transport.read(JobRecord, "PATCH", f"/jobs/{job_id}", json=labels)

    def compare(self, job_ids: Sequence[str]) -> JobComparison:
        """Return results of several jobs, and the fields in which their job files differ."""
        return self._transport.read(JobComparison, "GET", "/jobs/compare", params={"job": list(job_ids)})

    def trials(self, job_id: str) -> SweepView:
        """Return the trials of a sweep, best first."""
        return self._transport.read(SweepView, "GET", f"/jobs/{job_id}/trials")

    def rounds(self, job_id: str) -> RoundsView:
        """Return the last rounds of a training job, oldest first."""
        return self._transport.read(RoundsView, "GET", f"/jobs/{job_id}/rounds")

    def cancel(self, job_id: str) -> JobRecord:
        """Cancel a queued job, or ask a running job to stop."""
        return self._transport.read(JobRecord, "POST", f"/jobs/{job_id}/cancel")

    def delete_job(self, job_id: str, *, cancel: bool = False) -> Deleted:
        """Delete a finished job and its data; with ``cancel``, stop an unfinished job and delete it afterwards."""
        params = {"cancel": True} if cancel else {}
        return self._transport.read(Deleted, "DELETE", f"/jobs/{job_id}", params=params)

    def delete_artifact(self, job_id: str, name: str) -> Deleted:
        """Delete one artifact of a job."""
        return self._transport.read(Deleted, "DELETE", f"/jobs/{job_id}/artifacts/{quote(name, safe='')}")

    def delete_deployment(self, key: str) -> Deleted:
        """Delete the record of a stopped or failed deployment, by its id or its name."""
        return self._transport.read(Deleted, "DELETE", f"/deployments/{quote(key, safe='')}/history")

    def prune(self, *, dry_run: bool = False) -> PruneReport:
        """Delete records and files past their retention time; with ``dry_run`` only list them."""
        return self._transport.read(PruneReport, "POST", "/prune", params={"dry_run": dry_run})

    def make_failure(
        self, job_id: str, kind: Literal["kill", "stop"], contributor_id: str, *, duration_s: float = 0.0
    ) -> FailureMade:
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
        return self._transport.read(FailureMade, "POST", f"/jobs/{job_id}/failures", json=body)

    def resume(self, job_id: str) -> JobRecord:
        """Queue a failed or cancelled job again; it continues from its last checkpoint or finished rows, if any."""
        return self._transport.read(JobRecord, "POST", f"/jobs/{job_id}/resume")

    def events(
        self, job_id: str, *, after: int = 0, limit: int = 500, without: Sequence[str] = ()
    ) -> EventPage:
        """Return a page of a job's events with numbers above ``after``, except events of the kinds in ``without``."""
        params = {"after": after, "limit": limit, "without": [*without]}
        return self._transport.read(EventPage, "GET", f"/jobs/{job_id}/events", params=params)

    def follow(self, job_id: str, *, after: int = 0, patience_s: float = 300.0) -> Iterator[EventRecord]:
        """Yield a job's events, past events first, until the job is finished.

        If the stream breaks, the client reopens it after the last event that it received.

        Args:
            job_id: the job.
            after: number of the last event that the caller already has.
            patience_s: time without an answer after which the client stops reopening the stream, in seconds.

        Raises:
            Unavailable: the server does not answer.
        """
        seen = after
        while self.job(job_id).state.is_final:
            # The stream of a finished job does not end, so the remaining events are read page by page.
            page = self.events(job_id, after=seen)
            if not page.events:
                return
            yield from page.events
            seen = page.next_after
        last_contact = time.monotonic()
        backoff = ExponentialBackoff(*_PAUSES_S)
        while True:
            try:
                for event in self._stream(job_id, seen):
                    last_contact = time.monotonic()
                    backoff.reset()
                    if event is None:
                        continue
                    seen = event.seq
                    yield event
                    if _is_end(event):
                        job = self.job(job_id)
                        if event.attempt == job.attempt and job.state.is_final:
                            return
            except httpx.TransportError:
                if time.monotonic() - last_contact > patience_s:
                    with self._transport.translated():
                        raise
            time.sleep(backoff.failed())

    def _stream(self, job_id: str, after: int) -> Iterator[EventRecord | None]:
        headers = {"Last-Event-ID": str(after)}
        timeout = httpx.Timeout(10.0, read=_READ_TIMEOUT_S)
        source: EventSource
        with connect_sse(
            self._transport.http, "GET", f"/jobs/{job_id}/events", headers=headers, timeout=timeout
        ) as source:
            raise_for_problem(source.response)
            for item in source.iter_sse():
                yield EventRecord.model_validate_json(item.data) if item.data else None

    def metrics(self, job_id: str, *, after_step: int = 0) -> list[MetricRecord]:
        """Return the metrics of the steps after ``after_step``."""
        params = {"after_step": after_step}
        return self._transport.read(JobMetrics, "GET", f"/jobs/{job_id}/metrics", params=params).metrics

    def metrics_file(self, job_id: str, format_: SeriesFormat, take: Callable[[bytes], object]) -> None:
        """Pass the pieces of a file with a job's series to ``take``, while they arrive."""
        downloads.fetch_pieces(self._transport, f"/jobs/{job_id}/metrics/file?format={format_}", take)

    # Serving

    def deploy(self, deployment: ServeJob | dict[str, Any]) -> DeploymentView:
        """Serve a model.

        Args:
            deployment: a `ServeJob` or a mapping. Paths in it are paths on the server.

        Raises:
            Conflict: a deployment with this name is up.
        """
        body = deployment.model_dump(mode="json") if isinstance(deployment, ServeJob) else deployment
        return self._transport.read(DeploymentView, "POST", "/deployments", json=body)

    def deployments(
        self, *, state: Sequence[DeploymentState] = (), limit: int = 50, cursor: str | None = None
    ) -> DeploymentPage:
        """Return a page of deployments in the given states (default: those that are up), newest first."""
        params: dict[str, Any] = {"state": [one.value for one in state], "limit": limit}
        params |= {"cursor": cursor} if cursor else {}
        return self._transport.read(DeploymentPage, "GET", "/deployments", params=params)

    def models(self) -> CatalogueView:
        """Return the models that the caller may serve; new ones may be pending."""
        return self._transport.read(CatalogueView, "GET", "/catalogue")

    def deployment(self, key: str) -> DeploymentView:
        """Return one deployment, by its id or its name."""
        return self._transport.read(DeploymentView, "GET", f"/deployments/{quote(key, safe='')}")

    def deployment_status(self, key: str) -> DeploymentStatus:
        """Return the current status of each replica of a deployment, by the deployment's id or name."""
        return self._transport.read(DeploymentStatus, "GET", f"/deployments/{quote(key, safe='')}/status")

    def scale(self, key: str, replicas: int | str | dict[str, Any]) -> DeploymentView:
        """Set the number or range of replicas of a deployment that is up, by its id or its name.

        Args:
            key: id or name.
            replicas: e.g. 3, ``0..4``, or fields of a `ReplicasSpec`.

        Raises:
            Conflict: the deployment has ended.
        """
        path = f"/deployments/{quote(key, safe='')}"
        return self._transport.read(DeploymentView, "PATCH", path, json={"replicas": replicas})

    def undeploy(self, key: str) -> DeploymentView:
        """Take a deployment down, by its id or its name."""
        return self._transport.read(DeploymentView, "DELETE", f"/deployments/{quote(key, safe='')}")

    def require_model(self, name: str) -> dict[str, Any]:
        """Return a model's entry in ``/v1/models``; raise the server's error if the model is not available."""
        return chatting.require_model(self._transport, name)

    def chat(
        self,
        model: str,
        messages: Sequence[dict[str, str]],
        *,
        resume_s: float = chatting.RESUME_S,
        **options: Any,
    ) -> Iterator[str]:
        """Yield a model's answer to a conversation, piece by piece; closing the iterator ends the request.

        If the connection breaks or the server restarts, the answer continues where it stopped.

        Args:
            model: name of a deployment.
            messages: mappings with ``role`` and ``content``.
            resume_s: seconds for which the client tries to resume a broken answer; 0 never resumes.
            options: further fields of the request to /v1/chat/completions: ``temperature``, ``max_tokens``, ...
        """
        request = {"model": model, "messages": list(messages), **options}
        return chatting.stream(self._transport, "chat/completions", request, resume_s=resume_s)

    def complete(
        self, model: str, prompt: str, *, resume_s: float = chatting.RESUME_S, **options: Any
    ) -> Iterator[str]:
        """Yield a model's continuation of a text, piece by piece; closing the iterator ends the request.

        The other arguments are those of `chat`; ``options`` are fields of the request to /v1/completions.
        """
        request = {"model": model, "prompt": prompt, **options}
        return chatting.stream(self._transport, "completions", request, resume_s=resume_s)

    # Planning

    def preview_data(self, job: TrainJob | dict[str, Any]) -> JobPreview:
        """Return the first rows of a job's data, as training would read them; paths are paths on the server."""
        return sending.previewed(self._transport, job)

    def plan(
        self,
        job: TrainJob | dict[str, Any],
        *,
        topology: TopologyDocument | None = None,
        strategy: str | None = None,
        compare: bool = False,
        serving: ServingRequest | None = None,
    ) -> PlanReport:
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
        ).model_dump(mode="json")
        return self._transport.read(PlanReport, "POST", "/plans", json=body, timeout=_PLAN_TIMEOUT_S)

    def topology(self) -> TopologyDocument:
        """Return the ready machines with their measured speeds and links."""
        return self._transport.read(TopologyDocument, "GET", "/topology")

    # Artifacts

    def artifacts(self, job_id: str) -> list[ArtifactRecord]:
        """Return the artifacts of a job: its finished results."""
        return self._transport.read(ArtifactList, "GET", f"/jobs/{job_id}/artifacts").artifacts

    def artifact(self, job_id: str, name: str) -> ArtifactFiles:
        """Return one artifact of a job and the list of its files."""
        path = f"/jobs/{job_id}/artifacts/{quote(name, safe='')}"
        return self._transport.read(ArtifactFiles, "GET", path)

    def checkpoints(self, job_id: str) -> list[CheckpointEntry]:
        """Return the checkpoints of a job that are on the server's disk, oldest first."""
        return self._transport.read(CheckpointList, "GET", f"/jobs/{job_id}/checkpoints").checkpoints

    def layout(self, job_id: str, source: str | int, **query: Any) -> WeightLayout:
        """Return where the weights of an artifact (its name) or of a checkpoint (its step) are; see `LayoutQuery`."""
        part = f"artifacts/{quote(source, safe='')}" if isinstance(source, str) else f"checkpoints/{source}"
        return self._transport.read(WeightLayout, "GET", f"/jobs/{job_id}/{part}/layout", params=query)

    def export(self, job_id: str, step: int) -> ArtifactRecord:
        """Export a checkpoint of a job as an artifact: a Hugging Face folder, or adapters."""
        path = f"/jobs/{job_id}/checkpoints/{step}/export"
        return self._transport.read(ArtifactRecord, "POST", path, timeout=_EXPORT_TIMEOUT_S)

    def download(
        self,
        job_id: str,
        name: str,
        folder: Path,
        *,
        called: str | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Path:
        """Download an artifact to the folder ``folder/called``, which appears only when it is complete.

        An interrupted download continues where it stopped.

        Args:
            job_id: the job.
            name: name of the artifact.
            folder: folder to download into.
            called: name of the downloaded folder; default: ``name``.
            progress: called with the number of bytes that arrived since the last call.

        Raises:
            Conflict: the target exists.
        """
        found = self.artifact(job_id, name)
        return downloads.download(self._transport, found, folder, progress, called or name)

    def alerts(self) -> list[Alert]:
        """Return the current alerts: errors first, then by start time, newest first."""
        return self._transport.read(AlertList, "GET", "/alerts").alerts

    def queue(self) -> list[QueuedJob]:
        """Return the queued jobs, in the order in which they were submitted."""
        return self._transport.read(QueueView, "GET", "/queue").jobs

    # Uploads

    def uploads(self) -> UploadList:
        """Return the caller's uploads (for an admin, all), newest first, with the used and the allowed space."""
        return self._transport.read(UploadList, "GET", "/uploads")

    def upload(
        self,
        path: Path,
        *,
        name: str | None = None,
        kind: UploadKind | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> UploadView:
        """Upload a file or a folder, which jobs can then name as ``upload:ID``.

        Args:
            path: file or folder. Hidden files and folders in a folder are left out.
            name: name to display; default: the name of the path.
            kind: kind of the upload; default: guessed from the files.
            progress: called with the number of bytes that were sent since the last call.

        Raises:
            UserError: the path cannot be read, it has no files, or a file does not fit the kind.
            TooLarge: the server has too little space.
        """
        return sending.send(self._transport, path, name, kind, progress)

    def remove_upload(self, upload_id: str) -> UploadView:
        """Remove an upload; raise Conflict if an unfinished job or a deployment uses it."""
        return self._transport.read(UploadView, "DELETE", f"/uploads/{quote(upload_id, safe='')}")

    # Keys, invites and contributors

    def create_key(self, name: str, scopes: Sequence[Scope] = (Scope.chat,)) -> KeyCreated:
        """Create an API key with these scopes; only this response contains the key."""
        body = {"name": name, "scopes": [scope.value for scope in scopes]}
        return self._transport.read(KeyCreated, "POST", "/keys", json=body)

    def api_keys(self) -> list[ApiKeyRecord]:
        """Return all API keys, oldest first, without the keys themselves."""
        return self._transport.read(KeyList, "GET", "/keys").keys

    def own_key_id(self) -> str:
        """Return the id of the API key that this client sends."""
        return self._transport.read(KeyList, "GET", "/keys").caller_id

    def revoke_key(self, key_id: str) -> ApiKeyRecord:
        """Revoke an API key."""
        return self._transport.read(ApiKeyRecord, "DELETE", f"/keys/{key_id}")

    def create_invite(
        self,
        label: str | None = None,
        expires_in_s: float = 3600,
        *,
        uses: int = 1,
        memory_bytes: int | None = None,
    ) -> InviteCreated:
        """Create an invite; only this response contains its code.

        Args:
            label: person or purpose of the invite.
            expires_in_s: validity, in seconds.
            uses: number of machines that may join with it.
            memory_bytes: largest memory that each of these machines may lend; default: no limit.
        """
        body = {"label": label, "expires_in_s": expires_in_s, "uses": uses, "memory_bytes": memory_bytes}
        return self._transport.read(InviteCreated, "POST", "/invites", json=body)

    def invites(self) -> list[InviteView]:
        """Return all invites, newest first."""
        return self._transport.read(InviteList, "GET", "/invites").invites

    def revoke_invite(self, invite_id: str) -> InviteView:
        """Revoke an invite."""
        return self._transport.read(InviteView, "DELETE", f"/invites/{invite_id}")

    def contributors(self, *, state: Sequence[ContributorState] = ()) -> list[ContributorRecord]:
        """Return the machines in these states, in order of joining; default: all but those gone for more than a day."""
        params: dict[str, Any] = {"state": [one.value for one in state]} if state else {}
        page = self._transport.read(ContributorList, "GET", "/contributors", params=params)
        found = list(page.contributors)
        while page.next_cursor is not None:
            params["cursor"] = page.next_cursor
            page = self._transport.read(ContributorList, "GET", "/contributors", params=params)
            found += page.contributors
        return found

    def cluster(self) -> ClusterView:
        """Return summaries of the machines with their work, and the islands of machines that are near each other."""
        return self._transport.read(ClusterView, "GET", "/cluster")

    def contributor(self, contributor_id: str) -> ContributorRecord:
        """Return one machine."""
        return self._transport.read(ContributorRecord, "GET", f"/contributors/{contributor_id}")

    def remove_contributor(self, contributor_id: str, *, keep_token: bool = False) -> ContributorRecord:
        """Ask a machine, with all devices of its host, to hand over its work and leave.

        The cluster's token is then replaced, unless ``keep_token`` is set.
        """
        path, params = f"/contributors/{contributor_id}", {"keep_token": keep_token}
        return self._transport.read(ContributorRecord, "DELETE", path, params=params)

    def rotate_token(self) -> TokenRotated:
        """Replace the cluster's token; return when the Ray head uses the new one, which can take minutes."""
        return self._transport.read(TokenRotated, "POST", "/cluster/token", timeout=_ROTATION_S)

    def measure_contributor(self, contributor_id: str) -> ContributorRecord:
        """Request that a machine be measured again when it is idle; return the machine's current record."""
        return self._transport.read(ContributorRecord, "POST", f"/contributors/{contributor_id}/measurement")

    def clear_contributor(self, contributor_id: str) -> ContributorRecord:
        """End the quarantine of a machine, so that it gets work again."""
        return self._transport.read(ContributorRecord, "DELETE", f"/contributors/{contributor_id}/quarantine")


def _is_end(event: EventRecord) -> bool:
    return event.kind == "state" and JobState(event.data["state"]).is_final
