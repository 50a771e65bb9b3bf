"""Routes that create, list, show, scale and take down deployments (served models)."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool

from share_compute.lifecycle.deployment_states import LIVE, DeploymentState
from share_compute.specification import parse_deployment
from share_compute.store import ApiKeyRecord, DeploymentRecord
from share_compute_api.schemas.bodies import (
    DeploymentPage,
    DeploymentStatus,
    DeploymentView,
    EventPage,
    ReplicasRequest,
)
from share_compute_api.server.auth import READ, Reader, Submitter, require_owner
from share_compute_api.server.context import Context, InContext
from share_compute_api.server.owned import shown
from share_compute_api.server.problems import documented
from share_compute_api.server.request_files import read_spec, spec_body
from share_compute_api.server.streams import After
from share_compute_api.server.upload_names import resolved
from share_compute_api.submission.deployments import check_deployment

router = APIRouter(prefix="/deployments", tags=["deployments"])

_FIRST_REASON = "submitted; nothing has placed it on machines yet"
_BODY = spec_body(
    "DeploymentRequest", {"name": "tiny-llama", "model": {"path": "/srv/models/tiny-llama"}, "max_seq": 2048}
)


@router.post(
    "",
    status_code=201,
    operation_id="createDeployment",
    openapi_extra={"requestBody": _BODY},
    responses=documented(400, 409, 413, 415, 429, 503),
)
async def create_deployment(request: Request, context: InContext, caller: Submitter) -> DeploymentView:
    """Create a deployment from JSON or YAML. Paths in it are paths on the server; ``upload:ID`` names an upload."""
    content_type, body = request.headers.get("content-type", ""), await request.body()
    made = await context.checks.run(caller.id, partial(_create, context, caller, content_type, body))
    return _view(made, context, caller)


def _create(context: Context, caller: ApiKeyRecord, content_type: str, body: bytes) -> DeploymentRecord:
    spec = read_spec(content_type, body, parse_deployment)
    with resolved(spec, context, caller) as found:
        check_deployment(found, context.store, context.isolated)
        return context.store.deployments.create(found, reason=_FIRST_REASON, owner=caller.id)


@router.get("", operation_id="listDeployments")
async def list_deployments(
    context: InContext,
    caller: Reader,
    state: Annotated[list[DeploymentState] | None, Query(description="May be given several times.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> DeploymentPage:
    """List deployments, newest first, in pages. Without ``state``, only deployments that are up are listed.

    Only the owner of a deployment and admins see ``spec.model.path``. Other API keys see ``hidden`` instead.
    """
    found, next_cursor = await run_in_threadpool(
        context.store.deployments.page, states=state or LIVE, limit=limit, cursor=cursor
    )
    return DeploymentPage(deployments=[_view(one, context, caller) for one in found], next_cursor=next_cursor)


@router.get("/{deployment}", operation_id="getDeployment", responses=documented(404))
async def get_deployment(deployment: str, context: InContext, caller: Reader) -> DeploymentView:
    """Return one deployment by id or name. If several had the name, return the live one, or else the newest."""
    return _view(await run_in_threadpool(context.store.deployments.get, deployment), context, caller)


@router.get(
    "/{deployment}/status", operation_id="getDeploymentStatus", dependencies=READ, responses=documented(404)
)
async def get_deployment_status(deployment: str, context: InContext) -> DeploymentStatus:
    """Return the status of each replica: its stages, its queue, and its measured and predicted speed."""
    record = await run_in_threadpool(context.store.deployments.get, deployment)
    supervisor = context.deployments
    replicas = [] if supervisor is None else supervisor.statuses(record.id)
    return DeploymentStatus(replicas=tuple(replicas))


@router.get(
    "/{deployment}/events", operation_id="getDeploymentEvents", dependencies=READ, responses=documented(404)
)
async def get_deployment_events(
    deployment: str,
    context: InContext,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 500,
) -> EventPage:
    """Return a deployment's events: interruptions, and changes of its state, plans and number of replicas."""
    record = await run_in_threadpool(context.store.deployments.get, deployment)
    start = 0 if after is None else after
    events = await run_in_threadpool(context.store.events.after, start, deployment_id=record.id, limit=limit)
    return EventPage.of(events, start)


@router.patch("/{deployment}", operation_id="changeDeployment", responses=documented(404, 409))
async def change_deployment(
    deployment: str, request: ReplicasRequest, context: InContext, caller: Submitter
) -> DeploymentView:
    """Change the number or range of replicas of a deployment that is up, by its id or its name."""
    own_id = await run_in_threadpool(_own_id, context, caller, deployment)
    change = context.store.deployments.set_replicas
    return _view(await run_in_threadpool(change, own_id, request.replicas), context, caller)


@router.delete("/{deployment}", operation_id="stopDeployment", responses=documented(404))
async def stop_deployment(deployment: str, context: InContext, caller: Submitter) -> DeploymentView:
    """Take a deployment down, by its id or its name; a repeated request changes nothing."""
    own_id = await run_in_threadpool(_own_id, context, caller, deployment)
    return _view(await run_in_threadpool(context.store.deployments.stop, own_id), context, caller)


def _own_id(context: Context, caller: ApiKeyRecord, deployment: str) -> str:
    """Return the id of a deployment that the caller may change. Unlike a name, an id always means the same deployment.

    Raises:
        NotFound: the deployment does not exist.
        NotOwner: the deployment belongs to another key.
    """
    record = context.store.deployments.get(deployment)
    require_owner(caller, record.owner, f"deployment {record.name}")
    return record.id


def _view(record: DeploymentRecord, context: Context, caller: ApiKeyRecord) -> DeploymentView:
    """Return a deployment with its replica counts; must be called in the event loop, which owns the replicas."""
    supervisor = context.deployments
    replicas = None if supervisor is None or record.state.is_final else supervisor.replicas(record.id)
    return DeploymentView(**dict(shown(record, caller)), replicas=replicas)
