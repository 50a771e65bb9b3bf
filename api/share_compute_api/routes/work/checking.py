"""Validates a job or a deployment without submitting it, for the dashboard's forms."""

from __future__ import annotations

from share_compute.errors import UserError
from share_compute.files.field_errors import refused
from share_compute.specification import (
    BatchJob,
    Job,
    ServeJob,
    SparseJob,
    SweepJob,
    TrainJob,
    parse_job,
    parse_submission,
)
from share_compute.store import ApiKeyRecord
from share_compute_api.schemas.bodies import FieldProblem, JobPreview, SpecCheck, TaskPreview
from share_compute_api.server.context import Context
from share_compute_api.server.request_files import read_spec
from share_compute_api.server.upload_names import resolved
from share_compute_api.submission.batches import check_batch, check_inputs
from share_compute_api.submission.chains import check_links
from share_compute_api.submission.deployments import check_deployment
from share_compute_api.submission.jobs import check_data, check_job
from share_compute_api.submission.model_folders import below, checking
from share_compute_api.submission.placement import check_placement
from share_compute_api.submission.sparse import check_sparse
from share_compute_api.submission.sweeps import check_sweep
from share_compute_api.workers.isolated.messages import PreviewData


def checked(context: Context, caller: ApiKeyRecord, content_type: str, body: bytes) -> SpecCheck:
    """Check a job or deployment as its submission would; return the errors instead of raising them.

    Raises:
        HTTPException: the content type is neither JSON nor YAML.
    """
    kind = None
    try:
        spec = read_spec(content_type, body, parse_submission)
        kind = spec.kind
        with resolved(spec, context, caller, fetches=False) as found:
            if isinstance(found, ServeJob):
                _check_name(found, context)
                if not _is_remote(found):
                    check_deployment(found, context.store, context.isolated)
            else:
                check_any_job(found, context)
    except UserError as failure:
        fields = failure.details.get("fields") or [{"field": "", "problem": failure.message}]
        problems = [FieldProblem.model_validate(one) for one in fields]
        return SpecCheck(kind=kind, problems=problems, hint=failure.hint)
    return SpecCheck(kind=kind, problems=[])


def check_any_job(spec: Job, context: Context) -> None:
    """Check a job as its submission would.

    Raises:
        UserError: the job cannot run, for example because a file is missing; the error names the field.
    """
    if isinstance(spec, TrainJob):
        check_job(spec, context.isolated)
        check_placement(spec, context.store)
        check_links(spec, context.store, context.isolated)
    elif isinstance(spec, SparseJob):
        check_sparse(spec, context.store, context.isolated)
    elif isinstance(spec, SweepJob):
        check_sweep(spec, context.isolated)
        with below("job"):
            check_placement(spec.job, context.store)
    elif _is_remote(spec):
        check_inputs(spec, context.isolated)
    else:
        check_batch(spec, context.store, context.engines, context.isolated)


def previewed(context: Context, caller: ApiKeyRecord, content_type: str, body: bytes) -> JobPreview:
    """Return the first rows of the data of each task of a training job, as training would read them.

    Raises:
        HTTPException: the content type is neither JSON nor YAML.
        UserError: the job or its data cannot be used; the error names each invalid field.
    """
    spec = read_spec(content_type, body, parse_job)
    with resolved(spec, context, caller) as found:
        check_data(found, context.isolated)
        previews = []
        for place, single in enumerate(found.single_tasks):
            name = found.tasks[place].name if found.tasks else None
            with checking(f"tasks.{place}.data" if place else "data"):
                shown = context.isolated.ask(PreviewData(data=single.data, task=single.resolved_task))
            previews.append(TaskPreview(task=name, data=shown))
        return JobPreview(tasks=previews)


def _is_remote(spec: BatchJob | ServeJob) -> bool:
    """Return whether the model is on the Hub, and has not been fetched."""
    return spec.model is not None and spec.model.hub is not None and spec.model.path is None


def _check_name(spec: ServeJob, context: Context) -> None:
    if context.store.deployments.by_name(spec.name) is None:
        return
    raise refused("name", f"a deployment {spec.name} is up", "choose another name")
