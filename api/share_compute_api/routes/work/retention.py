"""Routes that delete finished jobs, artifacts and deployments, and prune old data."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from share_compute_api.schemas.retention import Deleted, PruneReport
from share_compute_api.server.auth import ADMIN, Submitter, require_owner
from share_compute_api.server.context import InContext
from share_compute_api.server.owned import require_results
from share_compute_api.server.problems import documented
from share_compute_api.server.retention import cleaner

router = APIRouter(tags=["jobs"])


@router.delete(
    "/jobs/{job_id}", operation_id="deleteJob", responses={202: {"model": Deleted}, **documented(404, 409)}
)
def delete_job(
    job_id: str,
    context: InContext,
    caller: Submitter,
    response: Response,
    cancel: Annotated[
        bool, Query(description="Cancel an unfinished job, and delete it when it has ended.")
    ] = False,
) -> Deleted:
    """Delete a finished job with its events, metrics, checkpoints and artifacts; uploads stay.

    The job's files are removed within seconds. With ``cancel``, an unfinished job is cancelled first. If the job does
    not end at once, the status is 202, and the job is deleted when it has ended.
    """
    require_owner(caller, context.store.jobs.get(job_id).owner, f"job {job_id}")
    is_gone = context.store.deletions.job(job_id, context.settings.data_folder.resolve(), cancel=cancel)
    response.status_code = 200 if is_gone else 202
    return Deleted(id=job_id, is_deleted=is_gone)


@router.delete(
    "/jobs/{job_id}/artifacts/{name}", operation_id="deleteArtifact", responses=documented(404, 409)
)
def delete_artifact(job_id: str, name: str, context: InContext, caller: Submitter) -> Deleted:
    """Delete one artifact of a job; the artifact's files are removed within seconds."""
    require_results(context.store, job_id, caller)
    context.store.deletions.artifact(job_id, name)
    return Deleted(id=f"{job_id}/{name}", is_deleted=True)


@router.delete(
    "/deployments/{deployment}/history", operation_id="deleteDeployment", responses=documented(404, 409)
)
def delete_deployment(deployment: str, context: InContext, caller: Submitter) -> Deleted:
    """Delete the record and the events of a stopped or failed deployment."""
    record = context.store.deployments.get(deployment)
    require_owner(caller, record.owner, f"deployment {record.name}")
    context.store.deletions.deployment(record.id)
    return Deleted(id=record.id, is_deleted=True)


@router.post("/prune", operation_id="prune", dependencies=ADMIN)
def prune(
    context: InContext,
    dry_run: Annotated[bool, Query(description="Report what would be deleted; delete nothing.")] = False,
) -> PruneReport:
    """Delete data whose retention time is over. By default, the server itself also does this every hour."""
    return cleaner(context.settings, context.store).prune(dry_run=dry_run)
