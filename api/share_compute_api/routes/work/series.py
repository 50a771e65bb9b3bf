"""Routes that return the metrics of a job: for pages, and as files."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from share_compute.errors import UserError
from share_compute.files.series import SeriesFormat, write_series
from share_compute.lifecycle.attempt_events import Pictured
from share_compute.specification import TrainJob
from share_compute_api.schemas.bodies import JobMetrics
from share_compute_api.server.auth import READ
from share_compute_api.server.context import InContext
from share_compute_api.server.problems import documented
from share_compute_api.server.series import COLUMNS, columns_of, rows_of

router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=READ)

_MEDIA_TYPES: dict[SeriesFormat, str] = {
    "csv": "text/csv",
    "json": "application/json",
    "parquet": "application/vnd.apache.parquet",
}


@router.get("/{job_id}/metrics", operation_id="getMetrics", responses=documented(404))
def get_metrics(
    job_id: str,
    context: InContext,
    after_step: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    until_step: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="Last step to return (inclusive).")
    ] = None,
    most: Annotated[
        int | None,
        Query(
            ge=16,
            le=100_000,
            description="Approximate maximum number of steps per split. A longer split is reduced by min-max"
            " decimation: each section keeps the steps with its lowest and highest loss.",
        ),
    ] = None,
    format_: Annotated[str | None, Query(alias="format", include_in_schema=False)] = None,
) -> JobMetrics:
    """Return the metrics of each step."""
    if format_ is not None:
        raise UserError(
            "the metrics of a job have no format here",
            hint=f"GET /api/v1/jobs/{job_id}/metrics/file?format=csv, or json or parquet",
            job=job_id,
        )
    metrics = context.store.progress.metrics(job_id, after_step=after_step, until_step=until_step, most=most)
    return JobMetrics(metrics=metrics)


@router.get("/{job_id}/pictures", operation_id="getPictures", responses=documented(404))
def get_pictures(job_id: str, context: InContext) -> list[Pictured]:
    """Return the predictions of the job's last validation and test: confusion matrices, or points of a regression."""
    return context.store.progress.pictures(job_id)


@router.get(
    "/{job_id}/metrics/file",
    operation_id="getMetricsFile",
    response_class=StreamingResponse,
    responses={
        **documented(404),
        200: {
            "content": {
                kind: {"schema": {"type": "string", "format": "binary"}} for kind in _MEDIA_TYPES.values()
            }
        },
    },
)
def get_metrics_file(
    job_id: str,
    context: InContext,
    format: Annotated[SeriesFormat, Query(description="JSON is one array of rows.")] = "csv",  # noqa: A002
) -> StreamingResponse:
    """Return the series of a job as a file: losses, metrics, learning rate, speed and bytes, a row for each step.

    The file is written while it is sent. It has all metrics that are stored when its last rows are sent.
    """
    spec = context.store.jobs.get(job_id).spec
    columns = columns_of(spec) if isinstance(spec, TrainJob) else COLUMNS
    rows = rows_of(context.store, job_id)
    return StreamingResponse(
        write_series(rows, columns, format),
        media_type=_MEDIA_TYPES[format],
        headers={"Content-Disposition": f'attachment; filename="{job_id}-metrics.{format}"'},
    )
