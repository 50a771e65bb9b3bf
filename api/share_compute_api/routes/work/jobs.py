"""Routes that submit, list, show, cancel and resume jobs, and return their metrics."""

from __future__ import annotations

import csv
import io
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from share_compute.errors import Conflict, Unavailable
from share_compute.lifecycle.states import JobState
from share_compute.planning.report import PlanTimeline, unpredictable
from share_compute.specification import parse_any_job
from share_compute.store import ApiKeyRecord, JobRecord, MetricRecord
from share_compute_api.connection.departures import departure
from share_compute_api.control.machines.live_topology import live_topology
from share_compute_api.routes.work.checking import check_any_job, checked
from share_compute_api.schemas.bodies import JobMetrics, JobPage, SpecCheck
from share_compute_api.server.auth import READ, Reader, Submitter, require_owner
from share_compute_api.server.context import Context, InContext
from share_compute_api.server.owned import shown
from share_compute_api.server.problems import documented
from share_compute_api.server.request_files import read_spec, spec_body
from share_compute_api.server.upload_names import resolved
from share_compute_api.workers.planning import TimelineRequest

router = APIRouter(prefix="/jobs", tags=["jobs"])

_JOB_BODY = spec_body(
    "AnyJobRequest",
    {
        "name": "tiny-llama",
        "model": {"config": {"model_type": "llama", "vocab_size": 2048, "hidden_size": 128}},
        "data": {"files": ["/srv/texts/corpus.txt"]},
        "training": {"steps": 60, "batch_size": 16, "microbatches": 4},
    },
)
_CHECK_BODY = spec_body("AnySpecRequest", {"kind": "train", "data": {"dataset": "digits"}})
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="Name for this submission. A repeated request with the same name and job returns the first job.",
    ),
]


@router.post(
    "",
    status_code=201,
    operation_id="submitJob",
    openapi_extra={"requestBody": _JOB_BODY},
    responses=documented(400, 409, 413, 415, 429),
)
async def submit_job(
    request: Request, context: InContext, caller: Submitter, idempotency_key: IdempotencyKey = None
) -> JobRecord:
    """Queue a job from JSON or YAML. Paths in it are paths on the server; ``upload:ID`` names an upload."""
    content_type, body = request.headers.get("content-type", ""), await request.body()
    return await context.checks.run(
        caller.id, partial(_submit, context, caller, content_type, body, idempotency_key)
    )


def _submit(
    context: Context, caller: ApiKeyRecord, content_type: str, body: bytes, idempotency_key: str | None
) -> JobRecord:
    spec = read_spec(content_type, body, parse_any_job)
    with resolved(spec, context, caller) as found:
        check_any_job(found, context)
        return context.store.jobs.create(found, owner=caller.id, idempotency_key=idempotency_key)


@router.post(
    "/check",
    operation_id="checkJob",
    openapi_extra={"requestBody": _CHECK_BODY},
    responses=documented(413, 415, 429),
)
async def check_spec(request: Request, context: InContext, caller: Submitter) -> SpecCheck:
    """Return the errors that submitting this job or deployment would cause; nothing is queued."""
    content_type, body = request.headers.get("content-type", ""), await request.body()
    return await context.checks.run(caller.id, partial(checked, context, caller, content_type, body))


@router.get("", operation_id="listJobs")
def list_jobs(
    context: InContext,
    caller: Reader,
    state: Annotated[list[JobState] | None, Query(description="May be given several times.")] = None,
    kind: Annotated[str | None, Query(max_length=40)] = None,
    name: Annotated[
        str | None, Query(max_length=80, description="Part of the name; case is ignored.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> JobPage:
    """List jobs, newest first, in pages. In jobs of other keys, ``hidden`` replaces the paths in ``spec``."""
    jobs, next_cursor = context.store.jobs.page(
        states=state, kind=kind, name=name, limit=limit, cursor=cursor
    )
    return JobPage(jobs=[shown(job, caller) for job in jobs], next_cursor=next_cursor)


@router.get("/{job_id}", operation_id="getJob", responses=documented(404))
def get_job(job_id: str, context: InContext, caller: Reader) -> JobRecord:
    """Return one job."""
    return shown(context.store.jobs.get(job_id), caller)


@router.get(
    "/{job_id}/timeline",
    operation_id="getTimeline",
    dependencies=READ,
    responses=documented(404, 409, 500, 503),
)
async def get_timeline(job_id: str, request: Request, context: InContext) -> PlanTimeline:
    """Return the predicted timeline of one step of the job's plan, based on the layer times measured so far."""
    wanted = await run_in_threadpool(_timeline_request, job_id, context)
    problem = unpredictable(wanted.plan, wanted.topology)
    if problem is not None:
        return PlanTimeline(problem=problem)
    timeline = await context.plans.timeline(wanted, lambda: departure(request.receive, context.notifier))
    if timeline is None:
        raise Unavailable("the server is shutting down, or the client disconnected", hint="ask again")
    return timeline


def _timeline_request(job_id: str, context: Context) -> TimelineRequest:
    job = context.store.jobs.get(job_id)
    spec = job.training
    if job.plan is None:
        raise Conflict(f"job {job_id} has no plan", hint="wait until it runs", job=job_id)
    # The plan may contain machines that have left.
    machines = context.store.contributors.list(ids=job.plan.machines)
    return TimelineRequest(
        job=spec,
        plan=job.plan,
        topology=live_topology(machines),
        timings=context.store.progress.timings(job_id),
    )


@router.post("/{job_id}/cancel", operation_id="cancelJob", responses=documented(404, 409))
def cancel_job(job_id: str, context: InContext, caller: Submitter) -> JobRecord:
    """Cancel a queued job at once; ask a running job to stop soon."""
    require_owner(caller, context.store.jobs.get(job_id).owner, f"job {job_id}")
    return context.store.jobs.cancel(job_id)


@router.post("/{job_id}/resume", operation_id="resumeJob", responses=documented(404, 409))
def resume_job(job_id: str, context: InContext, caller: Submitter) -> JobRecord:
    """Queue a failed or cancelled job again; its ``reason`` says where the job continues."""
    require_owner(caller, context.store.jobs.get(job_id).owner, f"job {job_id}")
    return context.store.jobs.resume(job_id)


@router.get(
    "/{job_id}/metrics",
    operation_id="getMetrics",
    dependencies=READ,
    response_model=JobMetrics,
    responses={
        **documented(404),
        200: {"content": {"text/csv": {"schema": {"type": "string"}}}},
    },
)
def get_metrics(
    job_id: str,
    context: InContext,
    format: Literal["json", "csv"] = "json",  # noqa: A002 - the name of the query parameter
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
) -> JobMetrics | Response:
    """Return the metrics of each step, as JSON or as CSV with one column per metric."""
    metrics = context.store.progress.metrics(job_id, after_step=after_step, until_step=until_step, most=most)
    if format == "json":
        return JobMetrics(metrics=metrics)
    return Response(
        metrics_csv(metrics),
        media_type="text/csv",
        headers={"Content-Disposition": f'attachment; filename="{job_id}-metrics.csv"'},
    )


def metrics_csv(metrics: list[MetricRecord]) -> str:
    """Return metrics as CSV: step, split, then one column per metric, in order of first occurrence."""
    figures: dict[str, Any] = {}
    for record in metrics:
        figures |= dict.fromkeys(record.data)
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", "split", *figures])
    writer.writeheader()
    for record in metrics:
        writer.writerow({"step": record.step, "split": record.split, **record.data})
    return text.getvalue()
