"""Finished results, file by file. What is not complete is never listed."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from share_compute.errors import NotFound
from share_compute.store import ArtifactRecord
from share_compute_api.auth import Reader
from share_compute_api.context import InContext
from share_compute_api.owned import require_results
from share_compute_api.problems import documented
from share_compute_api.schemas import ArtifactFiles, ArtifactList, FileEntry

router = APIRouter(prefix="/jobs/{job_id}/artifacts", tags=["artifacts"])


@router.get("", operation_id="listArtifacts", responses=documented(404))
def list_artifacts(job_id: str, context: InContext, caller: Reader) -> ArtifactList:
    """List a job's finished results. They are for the key that submitted it, and for admins."""
    require_results(context.store, job_id, caller)
    return ArtifactList(artifacts=context.store.progress.artifacts(job_id))


@router.get("/{name}", operation_id="getArtifact", responses=documented(404))
def get_artifact(job_id: str, name: str, context: InContext, caller: Reader) -> ArtifactFiles:
    """Return one result and its files."""
    require_results(context.store, job_id, caller)
    artifact = context.store.progress.artifact(job_id, name)
    return ArtifactFiles(artifact=artifact, files=_files(artifact))


@router.get(
    "/{name}/files/{path:path}",
    operation_id="getArtifactFile",
    response_class=FileResponse,
    responses={
        **documented(404),
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The part that the Range header asks for."},
        416: {"description": "The Range header asks for what is not there."},
    },
)
def get_artifact_file(job_id: str, name: str, path: str, context: InContext, caller: Reader) -> FileResponse:
    """Return one file of a result; Range and If-Range work, so a download can go on where it stopped."""
    require_results(context.store, job_id, caller)
    artifact = context.store.progress.artifact(job_id, name)
    file = _inside(artifact.path, path)
    if file is None:
        raise NotFound(
            f"artifact {name} has no file {path}",
            mend=f"share-compute artifacts list {job_id} shows what there is",
            job=job_id,
        )
    return FileResponse(file, media_type="application/octet-stream", filename=file.name)


def _root(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _files(artifact: ArtifactRecord) -> list[FileEntry]:
    found = sorted(artifact.path.rglob("*")) if artifact.path.is_dir() else [artifact.path]
    root = _root(artifact.path)
    return [
        FileEntry(path=file.relative_to(root).as_posix(), size_bytes=file.stat().st_size)
        for file in found
        if _inside(artifact.path, str(file.relative_to(root)))
    ]


def _inside(artifact: Path, path: str) -> Path | None:
    """Return the file if it is one of the artifact's own, following no way out of its folder."""
    if "\0" in path:
        return None
    file = (_root(artifact) / path).resolve()
    if artifact.is_dir():
        return file if file.is_file() and file.is_relative_to(artifact.resolve()) else None
    return file if file == artifact.resolve() and file.is_file() else None
