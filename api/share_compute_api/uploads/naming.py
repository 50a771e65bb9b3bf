"""Jobs that name uploads: which files they mean, and which jobs they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from share_compute.errors import UserError
from share_compute.specification import Named, upload_path, with_paths
from share_compute.specification.paths import AnyNamed
from share_compute.store import Store
from share_compute_api.model_folders import refused
from share_compute_api.schemas import UploadView
from share_compute_api.uploads.names import checked_path
from share_compute_api.uploads.shelf import Uploads


@contextmanager
def resolved(spec: AnyNamed, uploads: Uploads) -> Iterator[AnyNamed]:
    """Give the job with the paths of what it names as ``upload:ID``, which stays there inside the block.

    Raises:
        UserError: it names an upload that is not there, or is not complete; says in which field.
    """
    fields = {named[0]: field for path, field in _paths(spec) if (named := upload_path(path)) is not None}
    found: dict[str, UploadView] = {}

    def full(path: Path, field: str) -> Path:
        named = upload_path(path)
        if named is None:
            return path
        upload = found[named[0]]
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

    with ExitStack() as stack:
        # One by one: an error must name its field.
        for upload_id, field in fields.items():
            try:
                found[upload_id] = stack.enter_context(uploads.reading(upload_id))
            except UserError as failure:
                raise refused(field, failure.message, failure.mend or "name another upload") from failure
        yield with_paths(spec, full)


def users(store: Store) -> Callable[[Path], Sequence[str]]:
    """Return what names the unfinished jobs, and the deployments that are up, that use a folder."""

    def named(folder: Path) -> list[str]:
        found: list[tuple[str, Named]] = [(job.id, job.spec) for job in store.jobs.unfinished()]
        found += [(one.id, one.spec) for one in store.deployments.list()]
        return [name for name, spec in found if any(path.is_relative_to(folder) for path, _ in _paths(spec))]

    return named


def _paths(spec: Named) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []

    def note(path: Path, field: str) -> Path:
        found.append((path, field))
        return path

    with_paths(spec, note)
    return found
