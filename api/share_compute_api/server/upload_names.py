"""Resolves the files that jobs refer to (uploads, results, paths), and finds the jobs that use an upload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from share_compute.errors import NotFound, UserError
from share_compute.files.field_errors import refused
from share_compute.lifecycle.folders import job_folder
from share_compute.specification import Job, Named, SparseJob, SweepJob, TrainJob, upload_path, with_paths
from share_compute.specification.base import COMMIT
from share_compute.specification.paths import UPLOAD, AnyNamed, names_file
from share_compute.store import ApiKeyRecord, JobRecord, Store
from share_compute_api.schemas.bodies import UploadView
from share_compute_api.server.context import Context
from share_compute_api.server.owned import require_results
from share_compute_api.submission.model_folders import below, checking
from share_compute_api.uploads.names import checked_path


@contextmanager
def resolved(
    spec: AnyNamed,
    context: Context,
    caller: ApiKeyRecord,
    *,
    reads_data: bool = True,
    fetches: bool = True,
) -> Iterator[AnyNamed]:
    """Yield a copy of the job in which paths on the server replace its references to files.

    Uploads that the job names as ``upload:ID`` cannot be removed until the block ends.

    Args:
        spec: the job, or the deployment.
        context: the server's context.
        caller: the key that submits the job; uploads and results of other keys are treated as missing.
        reads_data: whether the job's data will be read. False for a plan, which reads only the model: server paths in
            the fields of data files then stay unchanged.
        fetches: whether a model of the Hub is fetched. If not, a model that has not been fetched gets no path, and a
            training job gets the model's configuration.

    Raises:
        FetchUnderWay: the model is still being fetched from the Hub.
        Unavailable: the Hub does not answer.
        UserError: the job names a missing or incomplete upload, a missing result, or a file that jobs may not read. The
            error names the field.
    """
    _check_result(spec, context.store, caller)
    spec = _with_hub_model(spec, context, caller, fetches=fetches)
    fields = {named[0]: field for path, field in _paths(spec) if (named := upload_path(path)) is not None}
    found: dict[str, UploadView] = {}

    def full(path: Path, field: str) -> Path:
        named = upload_path(path)
        if named is None and names_file(field) and not reads_data:
            return path
        if named is None:
            return _resolved_path(path, field, context, caller)
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
        with below("job") if isinstance(spec, SweepJob) else nullcontext():
            # Open the uploads one at a time, because an error must name its field.
            for upload_id, field in fields.items():
                try:
                    found[upload_id] = stack.enter_context(context.uploads.reading(upload_id, caller))
                except UserError as failure:
                    hint = failure.hint or "name another upload"
                    raise refused(field, failure.message, hint) from failure
            changed = with_paths(spec, full)
        yield changed


def with_upload_names(job: JobRecord, context: Context) -> JobRecord:
    """Return a copy of a job in which ``upload:ID`` replaces the folders of uploads, as its submitter wrote them."""
    folder = context.uploads.folder

    def named(path: Path, _: str) -> Path:
        if folder not in path.parents:
            return path
        upload_id, *inside = path.relative_to(folder).parts
        return Path(f"{UPLOAD}{upload_id}", *inside[1:])

    return job.model_copy(update={"spec": with_paths(job.spec, named)})


def at_commit_of(spec: Job, first: Job) -> Job:
    """Return a copy of a job, with the commit of ``first`` if both have the same Hub model, and the job names none.

    A submission that is repeated then finds the first one, although its branch may have moved.
    """
    if isinstance(spec, SweepJob):
        job = at_commit_of(spec.job, first.job) if isinstance(first, SweepJob) else spec.job
        return spec.model_copy(update={"job": job})
    model, before = getattr(spec, "model", None), getattr(first, "model", None)
    hub = getattr(model, "hub", None)
    if (
        model is None
        or hub is None
        or hub != getattr(before, "hub", None)
        or COMMIT.match(model.revision or "")
    ):
        return spec
    changed = model.model_copy(update={"revision": getattr(before, "revision", None)})
    return spec.model_copy(update={"model": changed})


def _with_hub_model(spec: AnyNamed, context: Context, caller: ApiKeyRecord, *, fetches: bool) -> AnyNamed:
    """Return a copy of the job in which a model of the Hub has its commit, and the upload with the model's files."""
    if isinstance(spec, SweepJob):
        with below("job"):
            job = _with_hub_model(spec.job, context, caller, fetches=fetches)
        return cast("AnyNamed", spec.model_copy(update={"job": job}))
    if isinstance(spec, SparseJob):
        return spec
    model = spec.model
    if model is None or model.hub is None:
        return spec
    try:
        with context.checks.away(caller.id):
            commit, upload_id = context.hub.find(model.hub, model.revision, caller, fetches=fetches)
        changes: dict[str, Any] = {"revision": commit, "path": upload_id and Path(f"{UPLOAD}{upload_id}")}
        if isinstance(spec, TrainJob):
            changes["config"] = None
            if upload_id is None:
                with context.checks.away(caller.id):
                    changes["config"] = context.hub.configuration(model.hub, commit)
    except UserError as failure:
        raise refused("model.hub", failure.message, failure.hint or "name another model") from failure
    return cast("AnyNamed", spec.model_copy(update={"model": model.model_copy(update=changes)}))


def _resolved_path(path: Path, field: str, context: Context, caller: ApiKeyRecord) -> Path:
    result = _own_result(path, context, caller)
    found = context.data_roots.resolve(path, field) if result is None else result
    if not names_file(field):
        with checking(field):
            context.data_roots.check_folder(found, field)
    return found


def _own_result(path: Path, context: Context, caller: ApiKeyRecord) -> Path | None:
    """Return the path, with links resolved, if it is inside a result of the caller's own job; else None."""
    data_folder = context.settings.data_folder
    if ".." in path.parts or not path.is_relative_to(data_folder):
        return None
    try:
        _, job_id, *_ = path.relative_to(data_folder).parts
        job = context.store.jobs.get(job_id)
        found = path.resolve()
        folder = job_folder(data_folder.resolve(), job.kind, job_id)
    except (NotFound, OSError, RuntimeError, ValueError):
        return None
    results = [result.path.resolve() for result in context.store.progress.artifacts(job_id)]
    is_result = found.is_relative_to(folder) and any(found.is_relative_to(result) for result in results)
    return found if is_result and caller.owns(job.owner) else None


def _check_result(spec: Named, store: Store, caller: ApiKeyRecord) -> None:
    if isinstance(spec, TrainJob | SparseJob | SweepJob) or spec.model is None or spec.model.job is None:
        return
    try:
        require_results(store, spec.model.job, caller)
    except NotFound as failure:
        raise refused("model.job", failure.message, failure.hint or "name another job") from failure


def users(store: Store) -> Callable[[Path], Sequence[str]]:
    """Return a function that lists the ids of the jobs and live deployments that use, or will use, a given folder."""

    def named(folder: Path) -> list[str]:
        # Read jobs first: a link that starts in between is then still in the list of jobs.
        found: list[tuple[str, Named]] = [(job.id, job.spec) for job in store.jobs.with_needed_files()]
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
