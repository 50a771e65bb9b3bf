"""Routes that submit, list, show, cancel and resume jobs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool

from share_compute.errors import Conflict, Unavailable
from share_compute.planning.report import PlanTimeline, unpredictable
from share_compute.specification import parse_any_job
from share_compute.store import ApiKeyRecord, JobRecord
from share_compute_api.connection.departures import departure
from share_compute_api.control.machines.live_topology import live_topology
from share_compute_api.routes.work.checking import check_any_job, checked, previewed
from share_compute_api.schemas.bodies import JobPage, JobPreview, SpecCheck
from share_compute_api.schemas.labels import MOST_COMPARED, JobComparison, JobQuery, LabelsRequest
from share_compute_api.server.auth import READ, Reader, Submitter, require_owner
from share_compute_api.server.comparison import compared, results_of
from share_compute_api.server.context import Context, InContext
from share_compute_api.server.owned import shown
from share_compute_api.server.problems import documented
from share_compute_api.server.request_files import read_spec, spec_body
from share_compute_api.server.upload_names import at_commit_of, resolved, with_upload_names
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
_PREVIEW_BODY = spec_body(
    "JobRequest",
    {
        "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
        "data": {"dataset": "digits"},
    },
)
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
    responses=documented(400, 409, 413, 415, 429, 503),
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
    if idempotency_key is not None:
        first = context.store.jobs.first(idempotency_key, owner=caller.id)
        spec = spec if first is None else at_commit_of(spec, first.spec)
    with resolved(spec, context, caller) as found:
        # A repeated submission is not checked again, because its job may use names and files that were free before.
        submitted = context.store.jobs.submitted(found, owner=caller.id, idempotency_key=idempotency_key)
        if submitted is not None:
            return submitted
        check_any_job(found, context)
        return context.store.jobs.create(found, owner=caller.id, idempotency_key=idempotency_key)


@router.post(
    "/check",
    operation_id="checkJob",
    openapi_extra={"requestBody": _CHECK_BODY},
    responses=documented(413, 415, 429, 503),
)
async def check_spec(request: Request, context: InContext, caller: Submitter) -> SpecCheck:
    """Return the errors that submitting this job or deployment would cause; nothing is queued."""
    content_type, body = request.headers.get("content-type", ""), await request.body()
    return await context.checks.run(caller.id, partial(checked, context, caller, content_type, body))


@router.post(
    "/preview",
    operation_id="previewData",
    openapi_extra={"requestBody": _PREVIEW_BODY},
    responses=documented(400, 413, 415, 429),
)
async def preview_data(request: Request, context: InContext, caller: Submitter) -> JobPreview:
    """Return the first ten rows of a training job's data as training would read them; nothing is queued.

    The errors are those of submission. Texts and images are shortened.
    """
    content_type, body = request.headers.get("content-type", ""), await request.body()
    return await context.checks.run(caller.id, partial(previewed, context, caller, content_type, body))


@router.get("", operation_id="listJobs")
def list_jobs(context: InContext, caller: Reader, wanted: Annotated[JobQuery, Query()]) -> JobPage:
    """List jobs, newest first, in pages. In jobs of other keys, ``hidden`` replaces the paths in ``spec``.

    Trials of sweeps are left out, unless ``trials`` or a group is given.
    """
    jobs, next_cursor = context.store.jobs.page(
        states=wanted.state,
        kind=wanted.kind,
        name=wanted.name,
        tags=wanted.tag,
        group=wanted.group,
        trials=wanted.trials or wanted.group is not None,
        limit=wanted.limit,
        cursor=wanted.cursor,
    )
    results = results_of(context.store, [job.id for job in jobs])
    return JobPage(jobs=[shown(job, caller) for job in jobs], results=results, next_cursor=next_cursor)


@router.get("/compare", operation_id="compareJobs", responses=documented(404))
def compare_jobs(
    context: InContext,
    caller: Reader,
    job: Annotated[
        list[str], Query(min_length=1, max_length=MOST_COMPARED, description="Id; given several times.")
    ],
) -> JobComparison:
    """Return results of several jobs, and the fields in which their job files differ.

    Files of uploads have the names with which jobs name them. In jobs of other keys, ``hidden`` replaces the paths.
    """
    jobs = [shown(context.store.jobs.get(one), caller) for one in job]
    return compared(context.store, [with_upload_names(one, context) for one in jobs])


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
        topology=live_topology(machines, job.selection.ranks),
        timings=context.store.progress.timings(job_id),
    )


@router.patch("/{job_id}", operation_id="labelJob", responses=documented(404))
def label_job(job_id: str, request: LabelsRequest, context: InContext, caller: Submitter) -> JobRecord:
    """Change tags, group or note of a job, also after its end; fields that are left out keep their values."""
    require_owner(caller, context.store.jobs.get(job_id).owner, f"job {job_id}")
    return context.store.jobs.label(job_id, **request.changes())


@router.post("/{job_id}/cancel", operation_id="cancelJob", responses=documented(404, 409))
def cancel_job(job_id: str, context: InContext, caller: Submitter) -> JobRecord:
    """Cancel a queued job at once; ask a running job to stop. After success, cancel the links that wait."""
    require_owner(caller, context.store.jobs.get(job_id).owner, f"job {job_id}")
    return context.store.jobs.cancel(job_id)


@router.post("/{job_id}/resume", operation_id="resumeJob", responses=documented(404, 409))
def resume_job(job_id: str, context: InContext, caller: Submitter) -> JobRecord:
    """Queue a failed or cancelled job again; its ``reason`` says where the job continues.

    For a job that has succeeded, links that failed or were cancelled are started again.
    """
    require_owner(caller, context.store.jobs.get(job_id).owner, f"job {job_id}")
    return context.store.jobs.resume(job_id)
