"""Routes for a job's checkpoints, which users can export before the job ends."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool

from share_compute.errors import NotFound
from share_compute.lifecycle.attempt_events import ArtifactSaved
from share_compute.lifecycle.folders import TRAINING
from share_compute.specification import TrainJob
from share_compute.specification.paths import named_paths
from share_compute.store import ArtifactRecord
from share_compute_actors.machine.confine import Policy
from share_compute_api.schemas.bodies import CheckpointEntry, CheckpointList
from share_compute_api.schemas.layout import WeightLayout
from share_compute_api.server.auth import Reader, Submitter
from share_compute_api.server.context import Context, InContext
from share_compute_api.server.owned import require_results
from share_compute_api.server.problems import documented
from share_compute_api.server.results import LayoutQuery, weight_layout
from share_compute_api.workers.exporting import ExportRequest

router = APIRouter(prefix="/jobs/{job_id}/checkpoints", tags=["artifacts"])

_STEP = "step-"
Step = Annotated[int, InPath(ge=0, le=2**31 - 1)]


@router.get("", operation_id="listCheckpoints", responses=documented(404))
def list_checkpoints(job_id: str, context: InContext, caller: Reader) -> CheckpointList:
    """List a job's checkpoints, oldest first. Only the key that submitted the job and admins may list them."""
    require_results(context.store, job_id, caller)
    entries = (_entry(step, folder) for step, folder in _found(job_id, context).items())
    return CheckpointList(checkpoints=[entry for entry in entries if entry is not None])


@router.get("/{step}/layout", operation_id="getCheckpointLayout", responses=documented(400, 404, 503))
def get_checkpoint_layout(
    job_id: str, step: Step, context: InContext, caller: Reader, wanted: Annotated[LayoutQuery, Query()]
) -> WeightLayout:
    """Return in which file and in which layer each weight of a checkpoint is, and the machines that train it.

    The machines are those of the job's last plan. Weights of no known layer have none.
    """
    job = require_results(context.store, job_id, caller)
    return weight_layout(context, job, _require(job_id, step, context), wanted)


@router.post(
    "/{step}/export", status_code=201, operation_id="exportCheckpoint", responses=documented(404, 503)
)
async def export_checkpoint(job_id: str, step: Step, context: InContext, caller: Submitter) -> ArtifactRecord:
    """Export a checkpoint as an artifact, in the form of the job's own result: a Hugging Face folder, or adapters.

    The artifact's name is ``step-`` and the step in eight digits. A repeated export returns the existing artifact.
    """
    job = await run_in_threadpool(require_results, context.store, job_id, caller)
    name = f"{_STEP}{step:08}"
    async with context.exports.turn:
        made = await run_in_threadpool(_made, job_id, name, context)
        if made is not None:
            return made
        checkpoint = await run_in_threadpool(_require, job_id, step, context)
        target = _folder(job_id, context) / "exports" / name / "model"
        # The exporting process needs no files of the links, and must not be able to read them.
        spec = job.training.without_links()
        request = ExportRequest(checkpoint=checkpoint, spec=spec, target=target)
        size_bytes = await context.exports.export(request, _policy(spec, context))
        saved = ArtifactSaved(name=name, path=target, size_bytes=size_bytes)
        return await run_in_threadpool(context.store.progress.add_artifact, job_id, saved)


def _policy(spec: TrainJob, context: Context) -> Policy:
    """Return the access rights of the exporting process, which are limited because the checkpoint is untrusted.

    Write access covers the folder of all training jobs, since the Ray head could replace a deeper folder with a link.
    """
    return Policy(
        read=tuple(map(str, named_paths(spec))),
        write=(str(context.settings.data_folder / TRAINING),),
        user=None if context.cluster is None else context.cluster.head_user,
    )


def _folder(job_id: str, context: Context) -> Path:
    return context.settings.data_folder / TRAINING / job_id


def _made(job_id: str, name: str, context: Context) -> ArtifactRecord | None:
    """Return the artifact of an earlier export; None if there is no such artifact or its folder is gone."""
    artifacts = context.store.progress.artifacts(job_id)
    return next((found for found in artifacts if found.name == name and found.path.is_dir()), None)


def _found(job_id: str, context: Context) -> dict[int, Path]:
    """Return the folder of each complete checkpoint of a job, by step, in ascending order."""
    folders = (_folder(job_id, context) / "checkpoints").glob(f"{_STEP}*")
    return {int(folder.name.removeprefix(_STEP)): folder for folder in sorted(folders) if folder.is_dir()}


def _require(job_id: str, step: int, context: Context) -> Path:
    """Return the folder of a checkpoint; raise NotFound if there is no checkpoint of this step."""
    checkpoint = _found(job_id, context).get(step)
    if checkpoint is None:
        raise NotFound(
            f"job {job_id} has no checkpoint of step {step}",
            hint="list its checkpoints; older ones are deleted for newer ones, see training.checkpoints_kept",
            job=job_id,
        )
    return checkpoint


def _entry(step: int, folder: Path) -> CheckpointEntry | None:
    """Return the description of a checkpoint; None if the checkpoint was deleted in the meantime."""
    try:
        size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        saved_at = datetime.fromtimestamp(folder.stat().st_mtime, UTC)
    except FileNotFoundError:
        return None
    return CheckpointEntry(step=step, size_bytes=size_bytes, saved_at=saved_at)
