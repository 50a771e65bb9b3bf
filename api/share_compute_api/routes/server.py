"""Routes about the server itself: health, status, alerts, the queue, and the JSON schemas of jobs and deployments."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter, Request

from share_compute.scopes import Scope
from share_compute.specification import Kind, job_schema
from share_compute_api.connection.join_line import is_for_this_machine_alone, join_command
from share_compute_api.schemas.bodies import AlertList, Health, QueueView, Status
from share_compute_api.schemas.versions import local_versions
from share_compute_api.server.alerts import find_alerts
from share_compute_api.server.auth import READ, Reader
from share_compute_api.server.context import InContext

open_router = APIRouter(tags=["server"])
router = APIRouter(tags=["server"])


@open_router.get("/health", operation_id="getHealth")
async def get_health(context: InContext) -> Health:
    """Return the health and the clock of the server."""
    return Health(time=context.store.clock())


@open_router.get("/schemas/job", operation_id="getJobSchema")
def get_job_schema(kind: Kind = "train") -> dict[str, Any]:
    """Return the JSON schema of a job or a deployment of this kind, for editors and forms."""
    return job_schema(kind)


@router.get("/status", operation_id="getStatus")
def get_status(context: InContext, request: Request, caller: Reader) -> Status:
    """Return an overview of the server, machines and jobs. Only admins see the data folder and the address of Ray."""
    is_admin, url = caller.may(Scope.admin), context.url(request)
    return Status(
        url=url,
        is_for_one_machine=is_for_this_machine_alone(
            join_command(url, "", insecure=context.settings.insecure)
        ),
        data_folder=str(context.settings.data_folder) if is_admin else None,
        data_roots=tuple(str(root) for root in context.settings.data_roots),
        database=cast("Any", context.store.kind),
        has_cluster=context.cluster is not None,
        ray_address=context.cluster.info.ray_address if context.cluster and is_admin else None,
        versions=local_versions(),
        started_at=context.started_at,
        disk_free_bytes=_free_bytes(context.settings.data_folder),
        contributors=context.store.contributors.counts(),
        jobs=context.store.jobs.counts(),
    )


def _free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    place = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    return shutil.disk_usage(place).free


@router.get("/alerts", operation_id="listAlerts", dependencies=READ)
def list_alerts(context: InContext) -> AlertList:
    """List the current alerts. An event of kind ``alerts`` reports each change."""
    return AlertList(alerts=find_alerts(context))


@router.get("/queue", operation_id="getQueue", dependencies=READ)
def get_queue(context: InContext) -> QueueView:
    """List the queued jobs in the order of submission, each with the reason and the start of its wait."""
    return QueueView(jobs=context.store.jobs.queue())
