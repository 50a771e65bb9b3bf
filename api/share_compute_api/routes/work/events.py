"""Routes that return the events of a job or of the whole cluster, as pages or as a stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.concurrency import run_in_threadpool

from share_compute_api.connection.sse import MEDIA_TYPE
from share_compute_api.schemas.bodies import EventPage
from share_compute_api.server.auth import Reader
from share_compute_api.server.context import InContext
from share_compute_api.server.owned import shown_events
from share_compute_api.server.problems import documented
from share_compute_api.server.streams import STREAM_RESPONSE, After, LastEventId, starting_point, stream

router = APIRouter(tags=["events"])
WithFigures = Annotated[
    bool,
    Query(description="Also send live statistics of deployments, as events `figures` without a number."),
]


@router.get(
    "/jobs/{job_id}/events",
    operation_id="getJobEvents",
    response_model=EventPage,
    responses={
        **documented(404),
        200: {
            "description": "A page of events; with `Accept: text/event-stream`, a stream of events.",
            "content": STREAM_RESPONSE["content"],
        },
    },
)
async def get_job_events(
    job_id: str,
    context: InContext,
    caller: Reader,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 500,
    without: Annotated[
        list[str] | None,
        Query(max_length=20, description="Kinds of events that a page omits; may be given several times."),
    ] = None,
    last_event_id: LastEventId = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> EventPage | Response:
    """Return a job's events, oldest first."""
    await run_in_threadpool(context.store.jobs.get, job_id)
    start = starting_point(after, last_event_id, default=0)
    if MEDIA_TYPE in accept:
        return stream(context, start, caller, job_id=job_id)
    events = await run_in_threadpool(
        context.store.events.after, start, job_id=job_id, without=without or (), limit=limit
    )
    return EventPage.of(await run_in_threadpool(shown_events, events, context.store, caller), start)


@router.get("/events", operation_id="streamEvents", response_class=Response, responses={200: STREAM_RESPONSE})
async def stream_events(
    context: InContext,
    caller: Reader,
    after: After = None,
    last_event_id: LastEventId = None,
    figures: WithFigures = False,
) -> Response:
    """Stream the events of the whole cluster; without ``after``, only new events."""
    newest = await run_in_threadpool(context.store.events.last_seq)
    start = starting_point(after, last_event_id, default=newest)
    return stream(context, start, caller, includes_figures=figures)
