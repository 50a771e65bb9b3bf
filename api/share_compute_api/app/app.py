"""The control plane as an ASGI application."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial

from fastapi import FastAPI

from share_compute import __version__
from share_compute.errors import ShareComputeError
from share_compute.lifecycle.folders import BATCHES, TRAINING
from share_compute.settings import Settings
from share_compute.store import Store
from share_compute_api.app import dashboard, openapi
from share_compute_api.app.limits import BodyLimit
from share_compute_api.cluster.cluster import Cluster
from share_compute_api.control.batches.batches import BatchSupervisor
from share_compute_api.control.deployments.deployments import DeploymentSupervisor
from share_compute_api.control.jobs.chains import ChainSupervisor
from share_compute_api.control.jobs.coordinators import launcher, rechecked
from share_compute_api.control.jobs.jobs import JobSupervisor
from share_compute_api.control.jobs.leftovers import Leftovers
from share_compute_api.control.jobs.reports import ReportSupervisor
from share_compute_api.control.jobs.sweeps import SweepSupervisor
from share_compute_api.control.jobs.training_metrics import metered
from share_compute_api.control.keeping import keep_running
from share_compute_api.control.machines.contributors import ContributorSupervisor
from share_compute_api.control.machines.heartbeats import write_heartbeats
from share_compute_api.control.machines.machines import starter
from share_compute_api.control.machines.measuring import Measurements
from share_compute_api.control.patience import Patience
from share_compute_api.openai import problems as openai_problems
from share_compute_api.openai.replica import replica_launcher
from share_compute_api.routes import PREFIX, api_router
from share_compute_api.routes.metrics import router as metrics_router
from share_compute_api.routes.work.openai import router as openai_router
from share_compute_api.server import problems
from share_compute_api.server.alerts import AlertWatch
from share_compute_api.server.auth import check_routes
from share_compute_api.server.context import Context
from share_compute_api.server.retention import cleaner
from share_compute_api.server.series import rows_of
from share_compute_api.server.sessions import Sessions
from share_compute_api.server.token_rotation import TokenRotation
from share_compute_api.submission.chains import LinkStarter
from share_compute_api.submission.sweeps import TrialStarter
from share_compute_api.workers.isolated.pool import IsolatedProcesses

_MOST_BODY_BYTES = 1 << 20
_MOST_PROMPT_BYTES = 4 << 20
"""Maximum size of a request body of the OpenAI API, in bytes; a text of a million tokens fits."""


def create_app(
    settings: Settings,
    store: Store,
    *,
    cluster: Cluster | None = None,
    fingerprint: str | None = None,
    isolated: IsolatedProcesses | None = None,
) -> FastAPI:
    """Return the control plane's app: REST under ``/api/v1``, OpenAI API under ``/v1``, dashboard under ``/``.

    Args:
        settings: settings of the server.
        store: open store whose schema is up to date; the caller closes it.
        cluster: Ray head and gateway; if None, no machine can join and jobs stay queued.
        fingerprint: fingerprint of the server's TLS key, which invites contain; None if clients do not need it.
        isolated: processes for submitters' files, which the caller closes; if None, the app starts its own processes.
    """
    app = FastAPI(
        title="share-compute",
        summary="Joins lent machines into one cluster that trains and serves models.",
        version=__version__,
        lifespan=partial(_lifespan, closes_isolated=isolated is None),
        openapi_url=f"{PREFIX}/openapi.json",
        # FastAPI's documentation pages would load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = Context(
        settings=settings,
        store=store,
        cluster=cluster,
        sessions=Sessions(settings.data_folder, timedelta(days=settings.session_days)),
        started_at=store.clock(),
        fingerprint=fingerprint,
        isolated=isolated or IsolatedProcesses(),
    )
    problems.install(app)
    openai_problems.install(app)
    openapi.install(app)
    larger = {
        f"{openai_problems.PREFIX}/": _MOST_PROMPT_BYTES,
        # The route for uploads checks the free space, and writes the body to disk while it arrives.
        f"{PREFIX}/uploads/": sys.maxsize,
    }
    app.add_middleware(BodyLimit, most_bytes=_MOST_BODY_BYTES, larger=larger)
    # A router that is included without a prefix builds each of its routes twice: FastAPI checks that no path is empty.
    app.include_router(api_router(), prefix=PREFIX)
    app.include_router(openai_router)
    app.include_router(metrics_router)
    check_routes(app)
    dashboard.mount(app)
    return app


def end_streams(app: FastAPI) -> None:
    """End all open event streams. Call this before the server waits for open connections."""
    context: Context = app.state.context
    context.notifier.close()


@asynccontextmanager
async def _lifespan(app: FastAPI, *, closes_isolated: bool) -> AsyncIterator[None]:
    context: Context = app.state.context
    settings = context.settings
    unsubscribe = context.store.on_commit(context.notifier.notify)
    context.spawn(keep_running("alerts", AlertWatch(context).run))
    context.spawn(keep_running("heartbeats", partial(write_heartbeats, context.store.heartbeats)))
    context.spawn(keep_running("deletions", cleaner(context.settings, context.store).run))
    context.spawn(keep_running("streams", context.streams.run))
    reports = ReportSupervisor(
        context.store, settings.data_folder, partial(rows_of, context.store), context.notifier
    )
    context.spawn(keep_running("reports", reports.run))
    links = LinkStarter(context.store, context.engines, context.data_roots, context.isolated)
    context.spawn(keep_running("links", ChainSupervisor(context.store, links, context.notifier).run))
    trials = TrialStarter(context.store, context.data_roots)
    context.spawn(keep_running("sweeps", SweepSupervisor(context.store, trials, context.notifier).run))
    if context.cluster is not None:
        await _supervise(context, context.cluster)
    try:
        yield
    finally:
        unsubscribe()
        context.notifier.close()
        tasks = list(context.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await context.streams.close()
        if context.measurements is not None:
            await context.measurements.close()
        context.catalogue.close()
        if closes_isolated:
            await asyncio.to_thread(context.isolated.close)


async def _supervise(context: Context, cluster: Cluster) -> None:
    settings = context.settings
    context.measurements = Measurements(context.store, starter(cluster))
    jobs = JobSupervisor(
        context.store,
        metered(rechecked(launcher(cluster), context.data_roots), context.training_metrics),
        settings.data_folder / TRAINING,
        context.notifier,
        Patience(retry_s=settings.lost_after_s + 1),
        members=cluster.members,
        drift=settings.replan_drift,
        checkpoint_every_s=settings.checkpoint_every_s or None,
    )
    contributors = ContributorSupervisor(
        context.store, context.measurements, cluster.nodes, timedelta(seconds=settings.lost_after_s)
    )
    with suppress(ShareComputeError):  # `contributors.run` tries again
        await contributors.mark_earlier()
    context.deployments = DeploymentSupervisor(
        context.store,
        context.engines,
        replica_launcher(cluster),
        context.notifier,
        context.metrics.serving,
        cluster.members,
        settings.replica_drain_s,
    )
    batches = BatchSupervisor(
        context.store, context.engines, settings.data_folder / BATCHES, context.notifier
    )
    context.rotation = TokenRotation(cluster, jobs, context.store, context.spawn)
    context.spawn(keep_running("the cluster", cluster.run))
    context.spawn(keep_running("jobs", jobs.run))
    context.spawn(keep_running("batches", batches.run))
    context.spawn(keep_running("deployments", context.deployments.run))
    context.spawn(keep_running("contributors", contributors.run))
    context.spawn(
        keep_running(
            "leftovers",
            Leftovers(
                context.store, cluster.members, cluster.end_members, context.deployments.may_have_members
            ).run,
        )
    )
