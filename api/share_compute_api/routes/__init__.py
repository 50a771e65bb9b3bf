"""The routes under ``/api/v1``, one module for each resource."""

from __future__ import annotations

from fastapi import APIRouter

from share_compute_api.routes import keys, server, session
from share_compute_api.routes.machines import agents, cluster, contributors, invites, topology
from share_compute_api.routes.machines import overview as machines
from share_compute_api.routes.work import (
    artifacts,
    catalogue,
    checkpoints,
    deployments,
    events,
    failures,
    jobs,
    plans,
    retention,
    rounds,
    series,
    sweeps,
    uploads,
)
from share_compute_api.server.problems import documented

PREFIX = "/api/v1"


def api_router() -> APIRouter:
    """Return the router of the routes under `PREFIX`; the caller includes it with that prefix."""
    router = APIRouter(responses=documented(422))
    router.include_router(server.open_router)
    router.include_router(session.router)
    router.include_router(agents.router)
    for keyed in (
        server.router,
        keys.router,
        invites.router,
        cluster.router,
        machines.router,
        contributors.router,
        jobs.router,
        series.router,
        sweeps.router,
        rounds.router,
        retention.router,
        failures.router,
        deployments.router,
        catalogue.router,
        plans.router,
        topology.router,
        uploads.router,
        artifacts.router,
        checkpoints.router,
        events.router,
    ):
        router.include_router(keyed, responses=documented(401, 403))
    return router
