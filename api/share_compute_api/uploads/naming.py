"""Jobs that name uploads: which files they mean, and which jobs they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from share_compute.errors import UserError
from share_compute.jobs.states import JobState
from share_compute.specification import Named, upload_path, with_paths
from share_compute.specification.paths import AnyNamed
from share_compute.store import JobRecord, Store
from share_compute_api.model_folders import refused
from share_compute_api.uploads.names import checked_path
from share_compute_api.uploads.shelf import Uploads

_UNFINISHED = [state for state in JobState if not state.is_final]


@contextmanager
def resolved(spec: AnyNamed, uploads: Uploads) -> Iterator[AnyNamed]:
    """Give the job with the paths of what it names as ``upload:ID``, which stays there inside the block.

    Raises:
        UserError: it names an upload that is not there, or is not complete; says in which field.
    """
    found = {path: field for path, field in _paths(spec) if upload_path(path) is not None}
    wanted: dict[str, str] = {}
    for path, field in found.items():
        upload_id, _ = upload_path(path) or ("", "")
        wanted[upload_id] = field
    # One by one first: an error must name its field.
    for upload_id, field in wanted.items():
        try:
            with uploads.reading([upload_id]):
                pass
        except UserError as failure:
            raise refused(field, failure.message, failure.mend or "name another upload") from failure

    def full(path: Path, field: str) -> Path:
        named = upload_path(path)
        if named is None:
            return path
        upload = uploads.get(named[0])
        if not named[1]:
            return Path(upload.folder)
        try:
            inside = Path(upload.folder) / checked_path(named[1])
        except UserError as failure:
            raise refused(field, failure.message, "name a file of the upload") from failure
        if not inside.exists():
            names = ", ".join(file.path for file in upload.files[:5])
            raise refused(field, f"upload {upload.id} has no {named[1]}", f"name one of its files: {names}")
        return inside

    with uploads.reading(wanted):
        yield with_paths(spec, full)


def users(store: Store) -> Callable[[Path], Sequence[str]]:
    """Return what names the unfinished jobs, and the deployments that are up, that use a folder."""

    def named(folder: Path) -> list[str]:
        found: list[tuple[str, Named]] = [(job.id, job.spec) for job in _unfinished(store)]
        found += [(one.id, one.spec) for one in store.deployments.list()]
        return [name for name, spec in found if any(path.is_relative_to(folder) for path, _ in _paths(spec))]

    return named


def _unfinished(store: Store) -> Iterator[JobRecord]:
    cursor: str | None = None
    while True:
        jobs, cursor = store.jobs.page(states=_UNFINISHED, limit=500, cursor=cursor)
        yield from jobs
        if cursor is None:
            return


def _paths(spec: Named) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []

    def note(path: Path, field: str) -> Path:
        found.append((path, field))
        return path

    with_paths(spec, note)
    return found
