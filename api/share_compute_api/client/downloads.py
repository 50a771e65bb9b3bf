"""Downloads files.

An interrupted download of an artifact is resumed, and only a complete artifact gets its final name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import httpx

from share_compute.errors import Conflict, Unavailable, UserError
from share_compute_api.client.calls import Calls, StreamedCall, path_part
from share_compute_api.schemas.bodies import ArtifactFiles, FileEntry


def download(result: ArtifactFiles, folder: Path, progress: Callable[[int], None], name: str) -> Calls[Path]:
    """Download all files of an artifact to ``folder/name``; see `ApiTransfers.download`."""
    artifact = result.artifact
    target = folder / _relative(name)
    if target.exists():
        raise Conflict(f"{target} exists already", hint="remove it, or choose another folder")
    # The name contains the artifact's id, so that files of another artifact with the same name are not mixed in.
    partial = folder / f".{target.name}-{artifact.id}.part"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        base = f"/jobs/{path_part(artifact.job_id)}/artifacts/{path_part(artifact.name)}/files"
        for entry in result.files:
            url, path = f"{base}/{quote(entry.path)}", partial / _relative(entry.path)
            yield from _fetch(url, entry, path, progress)
        partial.rename(target)
    except OSError as failure:
        raise Unavailable(
            f"{target} cannot be written: {failure.strerror or failure}",
            hint="free space or choose another folder; the download continues where it stopped",
        ) from failure
    return target


def _relative(path: str) -> Path:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise UserError(f"the server names a file {path!r} outside of the artifact", hint="do not trust it")
    return Path(*parts)


def _fetch(url: str, entry: FileEntry, path: Path, progress: Callable[[int], None]) -> Calls[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    have_bytes = path.stat().st_size if path.exists() else 0
    if have_bytes > entry.size_bytes:
        path.unlink()
        have_bytes = 0
    progress(have_bytes)
    if have_bytes == entry.size_bytes:
        path.touch()
        return

    @contextmanager
    def written(status: int) -> Iterator[Callable[[bytes], None]]:
        continues = status == httpx.codes.PARTIAL_CONTENT
        if not continues:  # the server sends the whole file
            progress(-have_bytes)
        with path.open("ab" if continues else "wb") as file:

            def write(piece: bytes) -> None:
                file.write(piece)
                progress(len(piece))

            yield write

    yield from StreamedCall(url, written, {"Range": f"bytes={have_bytes}-"} if have_bytes else {})
    if path.stat().st_size != entry.size_bytes:
        raise Unavailable(
            f"{entry.path} arrived incomplete", hint="download again; it continues where it stopped"
        )
