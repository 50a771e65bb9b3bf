"""Sends local files and folders to the server, file by file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from share_compute.errors import ShareComputeError, TooLarge, Unavailable, UserError
from share_compute.quantities import bytes_text
from share_compute_api.client.calls import Calls, call
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
    path: Path, name: str | None, kind: UploadKind | None, progress: Callable[[int], None]
) -> Calls[UploadView]:
    """Send a file or a folder; see `ApiTransfers.upload`."""
    files = files_below(path)
    kind = kind or kind_of([inside for inside, _ in files])
    for inside, _ in files:
        check_suffix(inside, kind)
    yield from _require_space(sum(file.stat().st_size for _, file in files))
    body = {"name": name or path.resolve().name, "kind": kind}
    upload = yield from call(UploadView, "POST", "/uploads", json=body)
    base = f"/uploads/{upload.id}"
    try:
        for inside, file in files:
            yield from _send_file(f"{base}/files/{quote(inside)}", file, progress)
        done = call(UploadView, "POST", f"{base}/complete", timeout=_COMPLETE_TIMEOUT_S)
        return (yield from done)
    except GeneratorExit:  # nothing can be sent any more
        raise
    except BaseException:
        with suppress(ShareComputeError):  # the server later deletes uploads that were not completed
            yield from call(UploadView, "DELETE", base)
        raise


def _require_space(size_bytes: int) -> Calls[None]:
    # A server that rejects a body may close the connection before the client can read the reason.
    uploads = yield from call(UploadList, "GET", "/uploads")
    left = min(uploads.upload_limit_bytes, uploads.limit_bytes - uploads.used_bytes)
    if size_bytes > left:
        raise TooLarge(
            f"{bytes_text(size_bytes)} are more than the {bytes_text(max(left, 0))} that the server has room for",
            hint="remove uploads that nobody needs: share-compute uploads list",
        )


def _send_file(url: str, file: Path, progress: Callable[[int], None]) -> Calls[None]:
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
        arrived = yield from call(UploadFile, "PUT", url, content=pieces(), headers=headers)
    except OSError as failure:
        raise UserError(f"{file} cannot be read: {failure.strerror}", hint="fix its rights") from failure
    if arrived.sha256 != found.hexdigest():
        raise Unavailable(f"{file} did not arrive as it was sent", hint="send it again")
