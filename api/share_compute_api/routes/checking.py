"""What would be wrong with a job or a deployment, told as an answer and not as a refusal: forms ask as one types."""

from __future__ import annotations

from share_compute.errors import UserError
from share_compute.specification import ServeJob, TrainJob, parse_submission
from share_compute_api.batches.submission import check_batch
from share_compute_api.context import Context
from share_compute_api.routes.bodies import read_spec
from share_compute_api.schemas import FieldProblem, SpecCheck
from share_compute_api.serving.submission import check_deployment
from share_compute_api.submission import check_job
from share_compute_api.uploads.naming import resolved


def checked(context: Context, content_type: str, body: bytes) -> SpecCheck:
    """Return what submitting this would say.

    Raises:
        HTTPException: it is neither JSON nor YAML.
    """
    kind = None
    try:
        spec = read_spec(content_type, body, parse_submission)
        kind = spec.kind
        with resolved(spec, context.uploads) as found:
            if isinstance(found, TrainJob):
                check_job(found)
            elif isinstance(found, ServeJob):
                _check_name(found, context)
                check_deployment(found, context.store)
            else:
                check_batch(found, context.store, context.engines)
    except UserError as failure:
        fields = failure.details.get("fields") or [{"field": "", "problem": failure.message}]
        problems = [FieldProblem.model_validate(one) for one in fields]
        return SpecCheck(kind=kind, problems=problems, mend=failure.mend)
    return SpecCheck(kind=kind, problems=[])


def _check_name(spec: ServeJob, context: Context) -> None:
    if context.store.deployments.by_name(spec.name) is None:
        return
    problem = f"a deployment {spec.name} is up"
    raise UserError(
        problem, mend="choose another name", details={"fields": [{"field": "name", "problem": problem}]}
    )
