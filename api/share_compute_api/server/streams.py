"""Event streams (server-sent events) that can start after any past event."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import monotonic
from typing import Annotated

from fastapi import Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from share_compute.errors import UserError
from share_compute.store import ApiKeyRecord, EventRecord
from share_compute_api.connection import sse
from share_compute_api.server.context import Context
from share_compute_api.server.figures import KIND, PERIOD_S, SentFigures
from share_compute_api.server.owned import shown_events

_RECONNECT_MS = 1000
MOST = 2**63 - 1

After = Annotated[int | None, Query(ge=0, le=MOST, description="Only events with a higher number.")]
LastEventId = Annotated[str | None, Header(description="Number of the last event seen; wins over `after`.")]

STREAM_RESPONSE = {
    "description": "Events as they happen. Each has the event's number as `id` and its kind as `event`.",
    "content": {sse.MEDIA_TYPE: {"schema": {"type": "string"}}},
}


def starting_point(after: int | None, last_event_id: str | None, default: int) -> int:
    """Return the number of the event after which to read: ``last_event_id``, else ``after``, else ``default``.

    Raises:
        UserError: ``last_event_id`` is not the number of an event.
    """
    if last_event_id is None:
        return default if after is None else after
    if not (last_event_id.isascii() and last_event_id.isdigit()) or int(last_event_id) > MOST:
        raise UserError(
            f"Last-Event-ID {last_event_id!r} is not the id of an event of this server",
            hint="send the id of an event",
        )
    return int(last_event_id)


def stream(
    context: Context,
    after: int,
    caller: ApiKeyRecord,
    *,
    job_id: str | None = None,
    includes_figures: bool = False,
) -> StreamingResponse:
    """Stream all events after number ``after``, of one job or of the cluster, until the client disconnects.

    The stream also ends soon after the caller's key is revoked, and when the server shuts down.

    Args:
        context: context of the server.
        after: number of the last event that the client has received.
        caller: API key of the request.
        job_id: id of the job whose events are streamed; None for all events.
        includes_figures: whether to include live statistics of deployments. Events with statistics have no number: a
            client that reconnects gets current statistics, not the missed ones.
    """
    return StreamingResponse(
        _events(context, after, caller, job_id, SentFigures() if includes_figures else None),
        media_type=sse.MEDIA_TYPE,
        headers=sse.HEADERS,
    )


async def _events(
    context: Context, after: int, caller: ApiKeyRecord, job_id: str | None, figures: SentFigures | None
) -> AsyncIterator[bytes]:
    yield sse.reconnection(_RECONNECT_MS)
    wait_s = sse.KEEPALIVE_S if figures is None else PERIOD_S
    checked_s = sent_s = monotonic()
    is_notified = True
    while not context.notifier.is_closed:
        if monotonic() - checked_s >= sse.KEEPALIVE_S:
            if await run_in_threadpool(context.store.keys.valid, caller.id) is None:
                return
            checked_s = monotonic()
        ticket = context.notifier.ticket
        batch: list[EventRecord] = []
        if is_notified:
            found = await run_in_threadpool(context.store.events.after, after, job_id=job_id)
            batch = await run_in_threadpool(shown_events, found, context.store, caller)
        for record in batch:
            yield sse.event(record.model_dump_json(), kind=record.kind, id_=record.seq)
            after, sent_s = record.seq, monotonic()
        if figures is not None and context.deployments is not None:
            for one in figures.news(context.deployments.snapshots, monotonic()):
                yield sse.event(one.model_dump_json(), kind=KIND)
                sent_s = monotonic()
        is_notified = bool(batch) or await context.notifier.wait(ticket, wait_s)
        if monotonic() - sent_s >= sse.KEEPALIVE_S:
            sent_s = monotonic()
            yield sse.KEEPALIVE
