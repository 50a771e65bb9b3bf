"""Validates a job or a deployment without submitting it, for the dashboard's forms."""

from __future__ import annotations

from share_compute.errors import UserError
from share_compute.specification import Job, ServeJob, TrainJob, parse_submission
from share_compute.store import ApiKeyRecord
from share_compute_api.schemas.bodies import FieldProblem, SpecCheck
from share_compute_api.server.context import Context
from share_compute_api.server.request_files import read_spec
from share_compute_api.server.upload_names import resolved
from share_compute_api.submission.batches import check_batch
from share_compute_api.submission.deployments import check_deployment
from share_compute_api.submission.jobs import check_job
from share_compute_api.submission.model_folders import refused


def checked(context: Context, caller: ApiKeyRecord, content_type: str, body: bytes) -> SpecCheck:
    """Check a job or deployment as its submission would; return the errors instead of raising them.

    Raises:
        HTTPException: the content type is neither JSON nor YAML.
    """
    kind = None
    try:
        spec = read_spec(content_type, body, parse_submission)
        kind = spec.kind
        with resolved(spec, context, caller) as found:
            if isinstance(found, ServeJob):
                _check_name(found, context)
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
    else:
        check_batch(spec, context.store, context.engines, context.isolated)


def _check_name(spec: ServeJob, context: Context) -> None:
    if context.store.deployments.by_name(spec.name) is None:
        return
    raise refused("name", f"a deployment {spec.name} is up", "choose another name")
