"""Routes for artifacts (finished results) and their files. Incomplete artifacts are never listed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from share_compute.errors import NotFound
from share_compute.models.huggingface.licence import CARD
from share_compute.store import ArtifactRecord, JobRecord
from share_compute_api.hub.model_card import has_card, model_card
from share_compute_api.schemas.bodies import ArtifactFiles, ArtifactList, FileEntry
from share_compute_api.schemas.layout import WeightLayout
from share_compute_api.server.auth import Reader
from share_compute_api.server.context import Context, InContext
from share_compute_api.server.owned import require_results
from share_compute_api.server.problems import documented
from share_compute_api.server.results import LayoutQuery, open_result, root_of, weight_layout

router = APIRouter(prefix="/jobs/{job_id}/artifacts", tags=["artifacts"])


@router.get("", operation_id="listArtifacts", responses=documented(404))
def list_artifacts(job_id: str, context: InContext, caller: Reader) -> ArtifactList:
    """List a job's artifacts. Only the key that submitted the job and admins may list them."""
    require_results(context.store, job_id, caller)
    return ArtifactList(artifacts=context.store.progress.artifacts(job_id))


@router.get("/{name}", operation_id="getArtifact", responses=documented(404))
def get_artifact(job_id: str, name: str, context: InContext, caller: Reader) -> ArtifactFiles:
    """Return one artifact and its files. The model card, README.md, is written when it is read."""
    job = require_results(context.store, job_id, caller)
    artifact = context.store.progress.artifact(job_id, name)
    return ArtifactFiles(artifact=artifact, files=_files(context, job, artifact))


@router.get("/{name}/layout", operation_id="getArtifactLayout", responses=documented(400, 404, 503))
def get_artifact_layout(
    job_id: str, name: str, context: InContext, caller: Reader, wanted: Annotated[LayoutQuery, Query()]
) -> WeightLayout:
    """Return in which file and in which layer each weight of an artifact is, and the machines that trained it.

    The machines are those of the job's last plan. Weights of no known layer have none.
    """
    job = require_results(context.store, job_id, caller)
    artifact = context.store.progress.artifact(job_id, name)
    return weight_layout(context, job, artifact.path, wanted)


@router.get(
    "/{name}/files/{path:path}",
    operation_id="getArtifactFile",
    response_class=FileResponse,
    responses={
        **documented(404),
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The requested range of the file."},
        416: {"description": "The requested range is outside the file."},
    },
)
def get_artifact_file(job_id: str, name: str, path: str, context: InContext, caller: Reader) -> Response:
    """Return one file of an artifact. Range and If-Range are supported, so that interrupted downloads can continue."""
    job = require_results(context.store, job_id, caller)
    artifact = context.store.progress.artifact(job_id, name)
    if path == CARD and has_card(artifact, job) and any(_own_files(context, artifact)):
        return Response(model_card(context.store, job, artifact), media_type="application/octet-stream")
    opened = open_result(context.settings, job_id, artifact.path, path)
    if opened is None:
        raise NotFound(
            f"artifact {name} has no file {path}",
            hint=f"share-compute artifacts list {job_id} shows what there is",
            job=job_id,
        )
    return _OpenedFile(opened, Path(path).name)


class _OpenedFile(FileResponse):
    """Response that sends a file from an open handle, because a link may have replaced the file at its path."""

    def __init__(self, opened: BufferedReader, name: str) -> None:
        self._opened = opened
        super().__init__(
            f"/dev/fd/{opened.fileno()}",
            stat_result=os.fstat(opened.fileno()),
            media_type="application/octet-stream",
            filename=name,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file, and close it even after an error."""
        with self._opened:
            await super().__call__(scope, receive, send)


def _files(context: Context, job: JobRecord, artifact: ArtifactRecord) -> list[FileEntry]:
    """Return the files of an artifact; the generated model card replaces a file with the same name."""
    entries = list(_own_files(context, artifact))
    if not entries or not has_card(artifact, job):
        return entries
    card = model_card(context.store, job, artifact)
    written = FileEntry(path=CARD, size_bytes=len(card.encode()))
    return [written, *(entry for entry in entries if entry.path != CARD)]


def _own_files(context: Context, artifact: ArtifactRecord) -> Iterator[FileEntry]:
    """Yield the files of an artifact that can be opened."""
    found = sorted(artifact.path.rglob("*")) if artifact.path.is_dir() else [artifact.path]
    root = root_of(artifact.path)
    for file in found:
        name = file.relative_to(root).as_posix()
        opened = open_result(context.settings, artifact.job_id, artifact.path, name)
        if opened is not None:
            with opened:
                yield FileEntry(path=name, size_bytes=os.fstat(opened.fileno()).st_size)
