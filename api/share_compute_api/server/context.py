"""State and services of the control plane that all routes can use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, TypeVar

from anyio import CapacityLimiter
from fastapi import Depends, Request

from share_compute.settings import Settings
from share_compute.store import Store
from share_compute_api.catalogue.catalogue import Catalogue
from share_compute_api.cluster.cluster import Cluster
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.deployments.deployments import DeploymentSupervisor
from share_compute_api.control.jobs.training_metrics import TrainingMetrics
from share_compute_api.control.machines.islands import IslandMap
from share_compute_api.control.machines.measuring import Measurements
from share_compute_api.control.machines.utilization import UtilizationMonitor
from share_compute_api.hub.fetching import HubModels
from share_compute_api.openai.engine import Engines
from share_compute_api.openai.metrics import PrometheusMetrics
from share_compute_api.openai.resumable.streams import ResumableStreams
from share_compute_api.server.budget import Budget
from share_compute_api.server.guesses import Guesses
from share_compute_api.server.sessions import Sessions
from share_compute_api.server.sign_in_codes import SignInCodes
from share_compute_api.server.token_rotation import TokenRotation
from share_compute_api.submission.data_roots import DataRoots
from share_compute_api.uploads.upload_store import UploadStore
from share_compute_api.workers.export_process import ExportProcesses
from share_compute_api.workers.isolated.pool import IsolatedProcesses
from share_compute_api.workers.plan_process import PlanProcesses

_HEARTBEAT_THREADS = 4
_DIALS = 4
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(slots=True)
class Context:
    """State and services of one running control plane."""

    settings: Settings
    store: Store
    cluster: Cluster | None
    sessions: Sessions
    """Sessions of the browsers that signed in."""
    started_at: datetime
    """Start time of the server."""
    isolated: IsolatedProcesses
    """Isolated processes for tokenizers, chat templates and schemas, with limits of memory and time."""
    fingerprint: str | None = None
    """Fingerprint of this server's TLS key, which invites contain. None if clients do not need it: for plain HTTP,
    behind a proxy, or with a certificate of a public authority."""
    codes: SignInCodes = field(default_factory=SignInCodes)
    """One-time codes with which browsers sign in."""
    guesses: Guesses = field(default_factory=Guesses)
    """Limits the rate at which clients can guess keys, sign-in codes and invites."""
    notifier: Notifier = field(default_factory=Notifier)
    uploads: UploadStore = field(init=False)
    """Files that users uploaded."""
    hub: HubModels = field(init=False)
    """Fetches models from the Hugging Face Hub into uploads."""
    data_roots: DataRoots = field(init=False)
    """Folders on the server whose files jobs may use."""
    catalogue: Catalogue = field(init=False)
    """Lists the models that can be served."""
    heartbeats: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_HEARTBEAT_THREADS))
    """Limiter for the threads that are reserved for heartbeats, so that heartbeats never wait for other requests."""
    dials: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_DIALS))
    """Limiter for concurrent reachability checks, in which the server connects to a machine's ports."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Background tasks, which are cancelled when the server shuts down."""
    plans: PlanProcesses = field(default_factory=PlanProcesses)
    """Computes plans in separate processes."""
    exports: ExportProcesses = field(default_factory=ExportProcesses)
    """Exports checkpoints in separate processes."""
    checks: Budget = field(default_factory=Budget)
    """Limits how many submissions are parsed and checked at the same time."""
    engines: Engines = field(init=False)
    """Engines that answer requests to served models."""
    streams: ResumableStreams = field(init=False)
    """Streams that clients can continue."""
    islands: IslandMap = field(init=False)
    """Computes groups of machines with similar links (islands)."""
    utilization: UtilizationMonitor = field(init=False)
    """Utilization of the machines over the last hour."""
    metrics: PrometheusMetrics = field(default_factory=PrometheusMetrics)
    """Metrics of served models, for Prometheus."""
    training_metrics: TrainingMetrics = field(default_factory=TrainingMetrics)
    """Metrics of training jobs, for Prometheus."""
    deployments: DeploymentSupervisor | None = None
    """Runs the deployments; None without a cluster."""
    rotation: TokenRotation | None = None
    """Replaces the cluster's token; None without a cluster."""
    measurements: Measurements | None = None
    """Measures contributors; None without a cluster."""

    def __post_init__(self) -> None:
        """Create the services that depend on other fields; load the uploads of earlier runs of the server."""
        self.engines = Engines(self.isolated)
        self.islands = IslandMap(self.store)
        self.utilization = UtilizationMonitor(self.store.clock)
        settings = self.settings
        self.streams = ResumableStreams(self.store, self.engines, self.notifier, settings.stream_keep_s)
        self.data_roots = DataRoots(settings.data_roots, [settings.data_folder])
        self.uploads = UploadStore(
            settings.data_folder / "uploads",
            settings.uploads_limit_bytes,
            settings.upload_limit_bytes,
            self.store.clock,
        )
        self.hub = HubModels(self.uploads, self.isolated)
        self.catalogue = Catalogue(settings, self.store, self.uploads, self.data_roots, self.isolated)

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a background task and return it; the task is cancelled when the server shuts down."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("a background task failed", exc_info=failure)

    def url(self, request: Request) -> str:
        """Return the URL at which other machines reach this server."""
        if self.settings.public_url is not None:
            return self.settings.public_url.rstrip("/")
        base = str(request.base_url).rstrip("/")
        if self.cluster is None:
            return base
        port = f":{request.url.port}" if request.url.port else ""
        return f"{request.url.scheme}://{self.cluster.info.advertise_address}{port}"


async def _context(request: Request) -> Context:
    # This is a coroutine function, because FastAPI runs plain functions in threads, and all threads may be busy.
    context: Context = request.app.state.context
    return context


InContext = Annotated[Context, Depends(_context)]
