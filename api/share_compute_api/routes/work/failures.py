"""Route for fault injection in tests and demonstrations; servers refuse such requests by default."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from share_compute.errors import Conflict, UserError
from share_compute.lifecycle.states import JobState
from share_compute_api.schemas.bodies import FailureMade, FailureRequest
from share_compute_api.server.auth import ADMIN
from share_compute_api.server.context import InContext
from share_compute_api.server.problems import documented

router = APIRouter(prefix="/jobs", tags=["jobs"])


@router.post(
    "/{job_id}/failures",
    status_code=202,
    operation_id="makeFailure",
    dependencies=ADMIN,
    responses=documented(400, 404, 409),
)
async def make_failure(job_id: str, request: FailureRequest, context: InContext) -> FailureMade:
    """Inject a fault into a member of a running job; the server must run with `allow_failures`."""
    if not context.settings.allow_failures:
        raise UserError(
            "this server does not let jobs fail on purpose",
            hint="start it with `share-compute up --allow-failures`, for tests only",
            job=job_id,
        )
    job = await run_in_threadpool(context.store.jobs.get, job_id)
    if job.state is not JobState.running or context.cluster is None:
        raise Conflict(
            f"the job is {job.state.value}, so it has no members", hint="wait until it runs", job=job_id
        )
    at = datetime.now(UTC)
    await context.cluster.make_fail(job_id, request.contributor_id, request.kind, request.duration_s)
    return FailureMade(kind=request.kind, contributor_id=request.contributor_id, at=at)
