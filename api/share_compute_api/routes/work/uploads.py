"""Routes for uploads: data, models and tokenizers that jobs name as ``upload:ID``."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from share_compute.errors import Unavailable, UserError
from share_compute_api.schemas.bodies import UploadFile, UploadList, UploadRequest, UploadView
from share_compute_api.server.auth import Reader, Submitter
from share_compute_api.server.context import InContext
from share_compute_api.server.problems import documented
from share_compute_api.server.upload_names import users
from share_compute_api.uploads.names import DATA_SUFFIXES

router = APIRouter(prefix="/uploads", tags=["uploads"])

_PIECE_BYTES = 1 << 20
_DIGEST = re.compile(r"(?:^|,)\s*sha-256\s*=\s*:([^:]*):")
_FILE = {"schema": {"type": "string", "format": "binary"}, "example": "a line of text\n"}
ContentDigest = Annotated[
    str | None,
    Header(
        max_length=500,
        description="SHA-256 of the body, as sha-256=:BASE64: (RFC 9530). A body with another hash is refused.",
    ),
]


@router.post("", status_code=201, operation_id="createUpload")
def create_upload(request: UploadRequest, context: InContext, caller: Submitter) -> UploadView:
    """Create an upload. Send its files, then complete it. Open uploads may be removed after a day without new files."""
    return context.uploads.create(request.name, request.kind, caller)


@router.get("", operation_id="listUploads")
def list_uploads(context: InContext, caller: Reader) -> UploadList:
    """List the caller's uploads (for admins: all), newest first, with the size of all uploads and the size limits."""
    uploads = context.uploads
    return UploadList(
        uploads=uploads.list(caller),
        used_bytes=uploads.used_bytes,
        limit_bytes=uploads.most_bytes,
        upload_limit_bytes=uploads.most_bytes_each,
        data_suffixes=list(DATA_SUFFIXES),
    )


@router.get("/{upload_id}", operation_id="getUpload", responses=documented(404))
def get_upload(upload_id: str, context: InContext, caller: Reader) -> UploadView:
    """Return one upload and the files that have arrived."""
    return context.uploads.get(upload_id, caller)


@router.put(
    "/{upload_id}/files/{path:path}",
    operation_id="putUploadFile",
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": _FILE}}},
    responses=documented(404, 409, 413, 503),
)
async def put_upload_file(
    upload_id: str,
    path: str,
    request: Request,
    context: InContext,
    caller: Submitter,
    content_digest: ContentDigest = None,
) -> UploadFile:
    """Send one file. A complete file replaces an earlier file with the same path; a partial file is discarded."""
    sha256 = _sha256(content_digest)
    announced = request.headers.get("content-length", "0")
    announced_bytes = int(announced) if announced.isdecimal() else 0
    arrival = await run_in_threadpool(context.uploads.receive, upload_id, path, caller, announced_bytes)
    waiting = bytearray()
    try:
        async for piece in request.stream():
            waiting += piece
            if len(waiting) >= _PIECE_BYTES:
                await run_in_threadpool(arrival.write, bytes(waiting))
                waiting.clear()
        await run_in_threadpool(arrival.write, bytes(waiting))
        return await run_in_threadpool(arrival.finish, sha256)
    except ClientDisconnect as failure:
        raise Unavailable(
            "the client disconnected before the whole file arrived", hint="send it again"
        ) from failure
    finally:
        arrival.close()


@router.post("/{upload_id}/complete", operation_id="completeUpload", responses=documented(404, 409))
def complete_upload(upload_id: str, context: InContext, caller: Submitter) -> UploadView:
    """Check and complete an upload. Jobs can then use the upload, and its files no longer change.

    A repeated request changes nothing.
    """
    return context.uploads.complete(upload_id, caller)


@router.delete("/{upload_id}", operation_id="removeUpload", responses=documented(404, 409))
def remove_upload(upload_id: str, context: InContext, caller: Submitter) -> UploadView:
    """Remove an upload that no unfinished job and no live deployment uses; return the removed upload."""
    return context.uploads.remove(upload_id, users(context.store), caller)


def _sha256(content_digest: str | None) -> str | None:
    if content_digest is None:
        return None
    found = _DIGEST.search(content_digest)
    try:
        digest = base64.b64decode(found[1], validate=True) if found else b""
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise UserError(
            "the header Content-Digest has no SHA-256", hint="write sha-256=:BASE64:, or leave it out"
        )
    return digest.hex()
