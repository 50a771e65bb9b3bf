"""Fast checks of a batch before it is queued: its files, their first rows, and its model or deployment."""

from __future__ import annotations

from share_compute.batches.parts import COLUMNS
from share_compute.errors import UserError
from share_compute.files.strict import nearest
from share_compute.specification import BatchJob, GenerateJob, ServedModelSpec, ServeJob
from share_compute.store import JobRecord, Store
from share_compute_api.openai.batch_rows import text_request
from share_compute_api.openai.engine import Engines
from share_compute_api.submission.deployments import check_deployment
from share_compute_api.submission.model_folders import checking, refused, require_path
from share_compute_api.workers.isolated.messages import CheckInputs, CheckSchema
from share_compute_api.workers.isolated.pool import IsolatedProcesses

_NAME_OF_ITS_OWN = "batch"
_MESSAGE = {"role": "user", "content": "?"}


def deployment_of(job: JobRecord, model: ServedModelSpec) -> ServeJob:
    """Return the specification of a batch's own deployment, whose name is the job's id."""
    return ServeJob(name=job.id, model=model)


def check_batch(spec: BatchJob, store: Store, engines: Engines, processes: IsolatedProcesses) -> None:
    """Check a batch's files, sampling options, and model or deployment, without regard to the cluster's machines.

    Args:
        spec: the batch.
        store: the store of jobs and deployments.
        engines: the engines of the served models.
        processes: isolated processes that read the submitter's files.

    Raises:
        UserError: the batch cannot run; the error names the field.
    """
    _check_data(spec, processes)
    if isinstance(spec, GenerateJob):
        _check_sampling(spec, processes)
    if spec.model is not None:
        check_deployment(ServeJob(name=_NAME_OF_ITS_OWN, model=spec.model), store, processes)
        return
    assert spec.deployment is not None
    if store.deployments.by_name(spec.deployment) is None:
        up = [record.name for record in store.deployments.list()]
        guess = nearest(spec.deployment, up)
        raise refused(
            "deployment",
            f"there is no deployment {spec.deployment}" + (f"; did you mean {guess!r}?" if guess else ""),
            "share-compute deployments lists those that are up; share-compute serve MODEL makes one",
        )
    engine = engines.find(spec.deployment)
    if engine is not None:
        require_kind(spec, engine.facts.kind)


def require_kind(spec: BatchJob, found: str) -> None:
    """Raise UserError unless the model's kind ``found`` (``generate`` or ``embed``) is the batch's kind."""
    if found == spec.kind:
        return
    what = "turns text into vectors" if found == "embed" else "writes text"
    raise refused(
        "deployment" if spec.model is None else "model",
        f"it {what}, which is not what kind: {spec.kind} asks for",
        f"make it kind: {found}, or name another model",
    )


def _check_data(spec: BatchJob, processes: IsolatedProcesses) -> None:
    for file in spec.data.files:
        with checking("data.files"):
            require_path(file, "data.files")
            if not file.is_file():
                raise refused("data.files", f"{file} is not a file", "name each file")
    is_chat = isinstance(spec, GenerateJob) and spec.data.messages is not None
    is_parquet = spec.data.files[0].suffix == ".parquet"
    question = CheckInputs(
        files=spec.data.files,
        column=spec.data.column,
        holds="messages" if is_chat else "text",
        taken=tuple(COLUMNS[spec.kind]),
        is_united=is_parquet and spec.output.format != "jsonl",
    )
    try:
        processes.ask(question)
    except UserError as failure:
        raise refused("data", failure.message, failure.hint or "fix the files") from failure


def _check_sampling(spec: GenerateJob, processes: IsolatedProcesses) -> None:
    try:
        request = text_request(spec, "?" if spec.data.messages is None else [_MESSAGE], seed=0)
        grammar = None if request.response_format is None else request.response_format.grammar
        if grammar is not None:
            processes.ask(CheckSchema(text=grammar, owner="batches"))
    except UserError as failure:
        raise refused("sampling", failure.message, "fix these options") from failure
