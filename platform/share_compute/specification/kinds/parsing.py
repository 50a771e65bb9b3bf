"""Parsers for jobs of all kinds and for deployments."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field, ValidationError

from share_compute.errors import UserError
from share_compute.files.field_errors import invalid
from share_compute.files.plain_yaml import read_yaml, wide_punctuation
from share_compute.files.problem_words import kind_of
from share_compute.specification.base import SpecModel, known
from share_compute.specification.batch import EmbedJob, GenerateJob
from share_compute.specification.job import TrainJob
from share_compute.specification.kinds.sweep import SweepJob
from share_compute.specification.serve import ServeJob
from share_compute.specification.sparse.job import SparseJob

Job = Annotated[TrainJob | GenerateJob | EmbedJob | SparseJob | SweepJob, Field(discriminator="kind")]
"""A job of any kind. A `ServeJob` is a deployment, not a job."""
AnyJob: TypeAlias = TrainJob | GenerateJob | EmbedJob | SparseJob | SweepJob
Kind = Literal["train", "generate", "embed", "sparse", "sweep", "serve"]
_KINDS: dict[str, type[AnyJob | ServeJob]] = {
    "train": TrainJob,
    "generate": GenerateJob,
    "embed": EmbedJob,
    "sparse": SparseJob,
    "sweep": SweepJob,
    "serve": ServeJob,
}
Spec = TypeVar("Spec", bound=SpecModel)


def parse_job(source: str | dict[str, Any]) -> TrainJob:
    """Read a training job from YAML (or JSON) text or from a mapping.

    Raises:
        UserError: the text or a field is invalid, or the job is of another kind.
    """
    return require_training(parse_any_job(source))


def require_training(job: AnyJob) -> TrainJob:
    """Return the job if it is a training job.

    Raises:
        UserError: the job is of another kind.
    """
    if isinstance(job, SparseJob):
        raise UserError(
            "kind: sparse has rows of weights and no layers, so it has no plan of stages",
            hint="share-compute submit FILE runs it; give a job of kind: train here",
        )
    if not isinstance(job, TrainJob):
        raise UserError(f"kind: {job.kind} trains nothing", hint="give a job of kind: train")
    return job


def parse_any_job(source: str | dict[str, Any]) -> AnyJob:
    """Read a job of any kind from YAML (or JSON) text or from a mapping.

    Raises:
        UserError: the text or a field is invalid, or the source is a deployment.
    """
    job = parse_submission(source)
    if isinstance(job, ServeJob):
        raise UserError(
            "kind: serve asks for a deployment, not for a job",
            hint="share-compute submit FILE makes one; programs send it to the route of deployments",
        )
    return job


def parse_deployment(source: str | dict[str, Any]) -> ServeJob:
    """Read a deployment from YAML (or JSON) text or from a mapping; ``kind`` may be left out.

    Raises:
        UserError: the text or a field is invalid.
    """
    return _validated(ServeJob, {"kind": "serve", **_mapping(source)})


def parse_submission(source: str | dict[str, Any]) -> AnyJob | ServeJob:
    """Read a job or a deployment, depending on its ``kind``, from YAML (or JSON) text or from a mapping.

    Raises:
        UserError: the text or a field is invalid.
    """
    data = _mapping(source)
    kind = data.get("kind", "train")
    return _validated(_KINDS.get(kind, TrainJob) if isinstance(kind, str) else TrainJob, data)


def _mapping(source: str | dict[str, Any]) -> dict[str, Any]:
    data: Any = read_yaml(source, "job file") if isinstance(source, str) else source
    if not isinstance(data, dict):
        is_empty = data is None
        if isinstance(source, str) and (typed := wide_punctuation(source)) is not None:
            raise UserError(f"the job file is not valid YAML: {typed}", hint="write it with a Latin keyboard")
        raise UserError(
            "the job file is empty"
            if is_empty
            else f"a job is a mapping of keys to values, not {kind_of(data)}",
            hint="start from a file in examples/",
        )
    try:
        known(data.get("kind", "train"), tuple(_KINDS), "kind")
    except ValueError as failure:
        raise UserError(str(failure), hint="fix the job's kind") from failure
    return data


def _validated(kind: type[Spec], data: dict[str, Any]) -> Spec:
    try:
        return kind.model_validate(data)
    except ValidationError as failure:
        hint = "fix these fields of the deployment" if kind is ServeJob else "fix these fields of the job"
        raise invalid(failure, hint) from failure


def job_schema(kind: Kind = "train") -> dict[str, Any]:
    """Return the JSON schema of a job or deployment of this kind, for editors and forms."""
    return _KINDS[kind].model_json_schema()
