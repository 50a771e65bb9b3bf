"""Routes for all machines at once: a summary, from which the dashboard draws a map, and their utilization."""

from __future__ import annotations

import gzip
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.concurrency import run_in_threadpool

from share_compute_api.schemas.cluster import ClusterView, Islands
from share_compute_api.schemas.utilization import ClusterUtilization
from share_compute_api.server.auth import READ
from share_compute_api.server.context import Context, InContext

_LEAST_BYTES = 2000
router = APIRouter(prefix="/cluster", tags=["contributors"])


@router.get("", operation_id="getCluster", dependencies=READ, response_model=ClusterView)
async def get_cluster(
    context: InContext,
    machine: Annotated[
        list[str] | None,
        Query(max_length=200, description="Only these machines; may be given several times."),
    ] = None,
    accept_encoding: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Return the islands and summaries of machines. By default, machines gone for more than a day are omitted."""
    islands = await context.islands.get()
    return await _json(await run_in_threadpool(_text, context, machine, islands), accept_encoding)


@router.get(
    "/utilization",
    operation_id="getClusterUtilization",
    dependencies=READ,
    response_model=ClusterUtilization,
)
async def get_cluster_utilization(
    context: InContext,
    machine: Annotated[
        list[str] | None,
        Query(max_length=1000, description="Only these machines; may be given several times."),
    ] = None,
    points: Annotated[
        int, Query(ge=0, le=120, description="Number of values of `busy` over the last hour.")
    ] = 0,
    accept_encoding: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Return the present utilization of the machines that reported in the last minute."""
    found = await run_in_threadpool(context.utilization.cluster, points=points, machines=machine)
    return await _json(found.model_dump_json().encode(), accept_encoding)


async def _json(text: bytes, accept_encoding: str) -> Response:
    """Return a response with JSON, compressed if it is long and the client accepts it."""
    headers = {"Vary": "Accept-Encoding"}
    # The summary of a thousand machines takes 0.5 MB, which gzip reduces to about an eighth.
    if "gzip" in accept_encoding and len(text) > _LEAST_BYTES:
        text = await run_in_threadpool(gzip.compress, text, 6)
        headers["Content-Encoding"] = "gzip"
    return Response(text, media_type="application/json", headers=headers)


def _text(context: Context, machines: list[str] | None, islands: Islands) -> bytes:
    view = ClusterView(machines=context.store.cluster.summaries(machines), islands=islands)
    return view.model_dump_json().encode()
