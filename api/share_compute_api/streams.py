"""Events as they happen (server-sent events), from any point of the past on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from share_compute.errors import UserError
from share_compute.store import ApiKeyRecord
from share_compute_api.context import Context

MEDIA_TYPE = "text/event-stream"
_KEEPALIVE_S = 10.0
_RECONNECT_MS = 1000
MOST = 2**63 - 1

After = Annotated[int | None, Query(ge=0, le=MOST, description="Only events with a higher number.")]
LastEventId = Annotated[str | None, Header(description="Number of the last event seen; wins over `after`.")]

STREAM_RESPONSE = {
    "description": "Events as they happen. Each has the event's number as `id` and its kind as `event`.",
    "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
}


def starting_point(after: int | None, last_event_id: str | None, default: int) -> int:
    """Return the number of the last event that the caller has seen."""
    if last_event_id is None:
        return default if after is None else after
    if not (last_event_id.isascii() and last_event_id.isdigit()) or int(last_event_id) > MOST:
        raise UserError(
            f"Last-Event-ID {last_event_id!r} is not a number of ours", mend="send the id of an event"
        )
    return int(last_event_id)


def stream(
    context: Context, after: int, caller: ApiKeyRecord, *, job_id: str | None = None
) -> StreamingResponse:
    """Answer with all events after number ``after``, of one job or of the pool, until the caller goes.

    A stream of a key that is revoked ends soon after; whoever comes back is refused.
    """
    return StreamingResponse(
        _events(context, after, caller.id, job_id),
        media_type=MEDIA_TYPE,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(context: Context, after: int, key_id: str, job_id: str | None) -> AsyncIterator[bytes]:
    yield format_sse_event(retry=_RECONNECT_MS)
    looked_s = time.monotonic()
    while not context.bell.is_closed:
        if time.monotonic() - looked_s >= _KEEPALIVE_S:
            if await run_in_threadpool(context.store.keys.valid, key_id) is None:
                return
            looked_s = time.monotonic()
        ticket = context.bell.ticket
        batch = await run_in_threadpool(context.store.events.after, after, job_id=job_id)
        for record in batch:
            yield format_sse_event(data_str=record.model_dump_json(), event=record.kind, id=str(record.seq))
            after = record.seq
        if not batch and not await context.bell.wait(ticket, _KEEPALIVE_S):
            yield KEEPALIVE_COMMENT
