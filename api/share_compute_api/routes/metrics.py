"""Route for metrics, at the path that Prometheus requests by default."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from share_compute_api.openai.metrics import MEDIA_TYPE
from share_compute_api.server.auth import READ
from share_compute_api.server.context import InContext
from share_compute_api.server.problems import documented

router = APIRouter(tags=["metrics"], responses=documented(401, 403))
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get(
    "/metrics",
    operation_id="getPrometheusMetrics",
    dependencies=READ,
    response_class=Response,
    responses={**_TEXT},
)
async def get_prometheus_metrics(context: InContext) -> Response:
    """Return metrics of served models, training jobs and machines for Prometheus.

    Prometheus must send an API key as a bearer token, from the ``authorization`` section of its configuration.
    """
    deployments = [] if context.deployments is None else context.deployments.snapshots()
    text = context.metrics.exposition(deployments) + context.training_metrics.exposition()
    text += context.utilization.exposition()
    return Response(text, media_type=MEDIA_TYPE)
