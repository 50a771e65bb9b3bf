"""Sends local files and folders to the server, file by file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from share_compute.errors import ShareComputeError, TooLarge, Unavailable, UserError
from share_compute.quantities import bytes_text
from share_compute_api.connection.transport import Transport
from share_compute_api.schemas.bodies import UploadFile, UploadList, UploadView
from share_compute_api.schemas.choices import UploadKind
from share_compute_api.uploads.names import check_suffix

_PIECE_BYTES = 1 << 20
_COMPLETE_TIMEOUT_S = 300.0


def files_below(path: Path) -> list[tuple[str, Path]]:
    """Return the file at ``path``, or all files below it that are not hidden, each as (relative name, path).

    Raises:
        UserError: the path does not exist, or has no file.
    """
    if path.is_file():
        return [(path.name, path)]
    found = [
        (file.relative_to(path).as_posix(), file)
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not found:
        raise UserError(
            f"{path} has no file to send" if path.is_dir() else f"{path} does not exist", hint="fix the path"
        )
    return found


def kind_of(names: list[str]) -> UploadKind:
    """Return the kind of an upload (data, model or tokenizer), guessed from the names of its files."""
    if "config.json" in names:
        return "model"
    return "tokenizer" if {"tokenizer.json", "tokenizer_config.json"} & set(names) else "data"


def send(
    transport: Transport,
    path: Path,
    name: str | None,
    kind: UploadKind | None,
    progress: Callable[[int], None],
) -> UploadView:
    """Send a file or a folder; see `Client.upload`."""
    files = files_below(path)
    kind = kind or kind_of([inside for inside, _ in files])
    for inside, _ in files:
        check_suffix(inside, kind)
    _require_space(transport, sum(file.stat().st_size for _, file in files))
    body = {"name": name or path.resolve().name, "kind": kind}
    upload = transport.read(UploadView, "POST", "/uploads", json=body)
    try:
        for inside, file in files:
            _send_file(transport, f"/uploads/{upload.id}/files/{quote(inside)}", file, progress)
        return transport.read(
            UploadView, "POST", f"/uploads/{upload.id}/complete", timeout=_COMPLETE_TIMEOUT_S
        )
    except BaseException:
        _forget(transport, upload)
        raise


def _require_space(transport: Transport, size_bytes: int) -> None:
    # A server that rejects a body may close the connection before the client can read the reason.
    uploads = transport.read(UploadList, "GET", "/uploads")
    left = min(uploads.upload_limit_bytes, uploads.limit_bytes - uploads.used_bytes)
    if size_bytes > left:
        raise TooLarge(
            f"{bytes_text(size_bytes)} are more than the {bytes_text(max(left, 0))} that the server has room for",
            hint="remove uploads that nobody needs: share-compute uploads list",
        )


def _send_file(transport: Transport, url: str, file: Path, progress: Callable[[int], None]) -> None:
    found = hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                found.update(piece)
                yield piece
                progress(len(piece))

    try:
        # With Content-Length, the server can check the free space before it reads the file.
        headers = {"Content-Length": str(file.stat().st_size), "Content-Type": "application/octet-stream"}
        arrived = transport.read(UploadFile, "PUT", url, content=pieces(), headers=headers)
    except OSError as failure:
        raise UserError(f"{file} cannot be read: {failure.strerror}", hint="fix its rights") from failure
    if arrived.sha256 != found.hexdigest():
        raise Unavailable(f"{file} did not arrive as it was sent", hint="send it again")


def _forget(transport: Transport, upload: UploadView) -> None:
    try:
        transport.request("DELETE", f"/uploads/{upload.id}")
    except ShareComputeError:  # the server later deletes uploads that were not completed
        return
