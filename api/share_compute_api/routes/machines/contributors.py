"""Routes that list, measure and remove contributors."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool

from share_compute.errors import Conflict, Unavailable
from share_compute.lifecycle.states import GONE, ContributorState
from share_compute.lifecycle.work import WorkRecord
from share_compute.store import ContributorRecord
from share_compute_actors.machine.head import invalidate_token
from share_compute_api.schemas.bodies import ContributorList, EventPage
from share_compute_api.schemas.cluster import BusyHistory, ContributorView
from share_compute_api.schemas.utilization import UtilizationHistory
from share_compute_api.server.auth import ADMIN, READ
from share_compute_api.server.context import InContext
from share_compute_api.server.problems import documented
from share_compute_api.server.streams import MOST

router = APIRouter(prefix="/contributors", tags=["contributors"])


@router.get("", operation_id="listContributors", dependencies=READ)
def list_contributors(
    context: InContext,
    state: Annotated[list[ContributorState] | None, Query(description="May be given several times.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 500,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> ContributorList:
    """List machines in the order they joined, in pages; without ``state``, omit machines gone for more than a day."""
    found, next_cursor = context.store.contributors.page(states=state, limit=limit, cursor=cursor)
    return ContributorList(contributors=found, next_cursor=next_cursor)


@router.get("/{contributor_id}", operation_id="getContributor", dependencies=READ, responses=documented(404))
def get_contributor(contributor_id: str, context: InContext) -> ContributorView:
    """Return one machine with its measurements and its current work."""
    record = context.store.contributors.get(contributor_id)
    (summary,) = context.store.cluster.summaries([contributor_id])
    utilization = context.utilization.latest(contributor_id)
    return ContributorView(**dict(record), owner=summary.owner, held=summary.held, utilization=utilization)


@router.get(
    "/{contributor_id}/events",
    operation_id="getContributorEvents",
    dependencies=READ,
    responses=documented(404),
)
def get_contributor_events(
    contributor_id: str,
    context: InContext,
    after: Annotated[int, Query(ge=0, le=MOST, description="Only events with a higher number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 500,
) -> EventPage:
    """Return a machine's events (changes of its state and its work), oldest first."""
    context.store.contributors.get(contributor_id)
    events = context.store.events.after(after, contributor_id=contributor_id, limit=limit)
    return EventPage.of(events, after)


@router.get(
    "/{contributor_id}/work", operation_id="getContributorWork", dependencies=READ, responses=documented(404)
)
def get_contributor_work(
    contributor_id: str, context: InContext, limit: Annotated[int, Query(ge=1, le=500)] = 200
) -> WorkRecord:
    """Return a machine's work: the parts of models that it held, for how long, and the steps and tokens it computed."""
    context.store.contributors.get(contributor_id)
    return context.store.work.of(contributor_id, limit=limit)


@router.get(
    "/{contributor_id}/busy", operation_id="getContributorBusy", dependencies=READ, responses=documented(404)
)
def get_contributor_busy(
    contributor_id: str,
    context: InContext,
    hours: Annotated[float, Query(gt=0, le=24 * 366)] = 24.0,
    points: Annotated[int, Query(ge=1, le=2000)] = 240,
) -> BusyHistory:
    """Return a machine's utilization by training jobs in the last ``hours``, as at most ``points`` values."""
    context.store.contributors.get(contributor_id)
    since = context.store.clock() - timedelta(hours=hours)
    return BusyHistory(measured=context.store.work.busy(contributor_id, since=since, points=points))


@router.get(
    "/{contributor_id}/utilization",
    operation_id="getContributorUtilization",
    dependencies=READ,
    responses=documented(404),
)
def get_contributor_utilization(contributor_id: str, context: InContext) -> UtilizationHistory:
    """Return the processor, memory, GPU, temperature and network use of a machine in the last hour."""
    context.store.contributors.get(contributor_id)
    return context.utilization.history(contributor_id)


@router.delete(
    "/{contributor_id}/quarantine",
    operation_id="clearContributor",
    dependencies=ADMIN,
    responses=documented(404),
)
def clear_contributor(contributor_id: str, context: InContext) -> ContributorRecord:
    """End the quarantine of a machine that computed wrong numbers, so that it gets work again."""
    return context.store.contributors.clear(contributor_id)


@router.post(
    "/{contributor_id}/measurement",
    status_code=202,
    operation_id="measureContributor",
    dependencies=ADMIN,
    responses=documented(404, 409, 503),
)
def measure_contributor(contributor_id: str, context: InContext) -> ContributorRecord:
    """Schedule a new measurement of a machine. The measurement starts when all machines of the same host are idle."""
    record = context.store.contributors.get(contributor_id)
    if record.state in GONE:
        raise Conflict(
            f"machine {record.name} is {record.state.value}", hint="let it join again", machine=record.name
        )
    if context.measurements is None:
        raise Unavailable("this server runs without a Ray cluster", hint="start it with `share-compute up`")
    context.measurements.want(contributor_id)
    return record


@router.delete(
    "/{contributor_id}", operation_id="removeContributor", dependencies=ADMIN, responses=documented(404)
)
async def remove_contributor(
    contributor_id: str,
    context: InContext,
    keep_token: Annotated[
        bool,
        Query(
            description="Keep the cluster's token and the machine's invite. Only for machines with a trusted owner."
        ),
    ] = False,
) -> ContributorRecord:
    """Ask a machine, with all joined devices of its host, to hand over its work and leave.

    The machine can come back only with a new invite: the invite by which it joined is revoked. When it has left, or
    after 90 s, the server replaces the cluster's token, which ends the machine's access to the cluster. With
    ``keep_token`` the token and the invite stay.
    """
    store = context.store.contributors
    await run_in_threadpool(store.get, contributor_id)
    if context.rotation is None or keep_token:
        return await run_in_threadpool(store.remove, contributor_id, revokes_invite=not keep_token)
    # If the server is killed after this line, it replaces the invalid token at its next start.
    await run_in_threadpool(invalidate_token, context.settings.data_folder)
    record = await run_in_threadpool(store.remove, contributor_id)
    context.rotation.begin()
    return record
