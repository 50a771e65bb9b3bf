"""Fast checks of a batch before it is queued: its files, their first rows, and its model or deployment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from share_compute.errors import UserError
from share_compute.files.field_errors import refused
from share_compute.files.strict import nearest
from share_compute.specification import BatchJob, GenerateJob, ServeJob
from share_compute.specification.token_options import TokenOptions
from share_compute.store import Store
from share_compute_api.openai.batch_rows import text_request
from share_compute_api.openai.completion import require_known_tokens, require_min_tokens_fit
from share_compute_api.openai.engine import Engines
from share_compute_api.openai.tokenizer_client import vocabulary_of
from share_compute_api.submission.deployments import check_deployment, model_folder
from share_compute_api.submission.model_folders import checking, require_path
from share_compute_api.workers.isolated.messages import CheckInputs, CheckSchema
from share_compute_api.workers.isolated.pool import IsolatedProcesses

_NAME_OF_ITS_OWN = "batch"
_MESSAGE = {"role": "user", "content": "?"}


def deployment_of(name: str, spec: BatchJob) -> ServeJob:
    """Return the specification of the deployment for a batch's own ``model``; its name is the job's id."""
    fields = spec.parallelism.model_dump()
    return ServeJob.model_validate({"name": name, "model": spec.model, "parallelism": fields})


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
    check_inputs(spec, processes)
    folder = _check_model(spec, store, engines, processes)
    if isinstance(spec, GenerateJob) and folder is not None:
        _check_tokens(spec.sampling, folder, processes)


def check_inputs(spec: BatchJob, processes: IsolatedProcesses) -> None:
    """Check a batch's files and sampling options, without regard to its model.

    Args:
        spec: the batch.
        processes: isolated processes that read the submitter's files.

    Raises:
        UserError: the batch cannot run; the error names the field.
    """
    _check_data(spec, processes)
    if isinstance(spec, GenerateJob):
        _check_sampling(spec, processes)


def _check_model(spec: BatchJob, store: Store, engines: Engines, processes: IsolatedProcesses) -> Path | None:
    """Check a batch's model or deployment; return the model's folder, or None if the deployment is not up."""
    if spec.model is not None:
        check_deployment(deployment_of(_NAME_OF_ITS_OWN, spec), store, processes)
        return model_folder(spec.model, store)
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
    if engine is None:
        return None
    require_kind(spec, engine.facts.kind)
    return engine.facts.folder


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
    # This imports pyarrow, which a starting server does not need.
    from share_compute.batches.parts import COLUMNS

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
    with _sampling():
        request = text_request(spec, "?" if spec.data.messages is None else [_MESSAGE], seed=0)
        most_tokens = request.default_tokens if request.most_tokens is None else request.most_tokens
        if most_tokens is not None:
            require_min_tokens_fit(request, most_tokens)
        grammar = None if request.response_format is None else request.response_format.grammar
        if grammar is not None:
            processes.ask(CheckSchema(text=grammar, owner="batches"))


def _check_tokens(options: TokenOptions, folder: Path, processes: IsolatedProcesses) -> None:
    """Check that the model of a folder has the tokens that the options name."""
    if not options.stop_token_ids and not options.logit_bias:
        return
    vocabulary = vocabulary_of(folder, processes)
    with _sampling():
        require_known_tokens(options, vocabulary)


@contextmanager
def _sampling() -> Iterator[None]:
    """Convert a `UserError` from the block, so that the field that it names is below ``sampling``."""
    try:
        yield
    except UserError as failure:
        option = failure.details.get("param")
        field = "sampling" if option is None else f"sampling.{option}"
        problem = failure.message.removeprefix(f"{option}: ")
        raise refused(field, problem, "fix these options") from failure
