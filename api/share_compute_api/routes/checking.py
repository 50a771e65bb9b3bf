"""What would be wrong with a job or a deployment, told as an answer and not as a refusal: forms ask as one types."""

from __future__ import annotations

from share_compute.errors import UserError
from share_compute.specification import Job, ServeJob, TrainJob, parse_submission
from share_compute.store import ApiKeyRecord
from share_compute_api.batches.submission import check_batch
from share_compute_api.context import Context
from share_compute_api.model_folders import refused
from share_compute_api.routes.bodies import read_spec
from share_compute_api.schemas import FieldProblem, SpecCheck
from share_compute_api.serving.submission import check_deployment
from share_compute_api.submission import check_job
from share_compute_api.uploads.naming import resolved


def checked(context: Context, caller: ApiKeyRecord, content_type: str, body: bytes) -> SpecCheck:
    """Return what submitting this would say.

    Raises:
        HTTPException: it is neither JSON nor YAML.
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
        return SpecCheck(kind=kind, problems=problems, mend=failure.mend)
    return SpecCheck(kind=kind, problems=[])


def check_any_job(spec: Job, context: Context) -> None:
    """Raise what submitting a job would find wrong with it.

    Raises:
        UserError: something of it is not there, or cannot be.
    """
    if isinstance(spec, TrainJob):
        check_job(spec, context.isolated)
    else:
        check_batch(spec, context.store, context.engines, context.isolated)


def _check_name(spec: ServeJob, context: Context) -> None:
    if context.store.deployments.by_name(spec.name) is None:
        return
    raise refused("name", f"a deployment {spec.name} is up", "choose another name")
