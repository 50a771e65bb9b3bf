"""Fast checks of a deployment before it is stored. They read the model's folder but do not load the model."""

from __future__ import annotations

from pathlib import Path

from share_compute.data.tokenization import has_tokenizer
from share_compute.errors import UserError
from share_compute.files.field_errors import refused
from share_compute.models.huggingface.encoder_types import pooling_of
from share_compute.models.huggingface.sizes import LAYER_KEYS, whole_number
from share_compute.specification import ServedModelSpec, ServeJob, TrainJob
from share_compute.store import Store
from share_compute_api.submission.data_roots import require_no_links, require_unlinked
from share_compute_api.submission.layer_checks import check_divided
from share_compute_api.submission.model_folders import (
    check_model_folder,
    check_ranks,
    check_stages,
    check_token_ids,
    check_weights,
    checking,
    largest_token_id,
    model_window,
    read_json,
)
from share_compute_api.submission.placement import check_selection
from share_compute_api.workers.isolated.pool import IsolatedProcesses


def model_folder(model: ServedModelSpec, store: Store) -> Path:
    """Return the folder of the model to be served: ``model.path``, or an artifact of a job.

    Raises:
        UserError: the job has no such artifact, the artifact has links, or the path now contains a link.
    """
    if model.path is not None:
        require_unlinked(model.path, "model.path")
        return model.path
    assert model.job is not None
    try:
        folder = store.progress.artifact(model.job, model.artifact).path
        require_no_links(folder)
    except UserError as failure:
        raise refused("model.job", failure.message, failure.hint or "name another job") from failure
    return folder


def check_deployment(spec: ServeJob, store: Store, processes: IsolatedProcesses) -> None:
    """Check a deployment's model, tokenizer and options; machines that it names need not be present.

    Args:
        spec: the deployment.
        store: the store of jobs and contributors.
        processes: isolated processes that read the model's tokenizer.

    Raises:
        UserError: the model cannot be served; the error names the field.
    """
    check_selection(spec.parallelism, store)
    named = {"model.hub": spec.model.hub, "model.path": spec.model.path}
    field = next((field for field, value in named.items() if value is not None), "model.job")
    folder = model_folder(spec.model, store)
    with checking(field):
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise refused(
                field,
                f"{folder} holds adapters, not a whole model",
                "train with training.lora.merge, or merge them into their model with peft",
            )
        if spec.model.job is not None and not (folder / "config.json").is_file():
            raise _no_served_model(spec.model.job, store)
        check_model_folder(folder, field)
        check_weights(folder, field)
        if not has_tokenizer(folder):
            raise refused(
                field, f"{folder} has no tokenizer", "copy tokenizer.json and tokenizer_config.json into it"
            )
    config = read_json(folder / "config.json", field)
    check_token_ids(largest_token_id(folder, field, processes), whole_number(config, "vocab_size"), field)
    check_stages(spec.parallelism.stages, whole_number(config, *LAYER_KEYS))
    try:
        is_encoder = pooling_of(folder, config) is not None
    except UserError as failure:
        raise refused(field, failure.message, failure.hint or "name another model") from failure
    if is_encoder and spec.dtype == "int8":
        raise refused(
            "dtype", "int8 is for models that write text, and this is an encoder", "choose bfloat16"
        )
    if is_encoder and spec.parallelism.tensor > 1:
        raise refused(
            "parallelism.tensor",
            "ranks share the layers of models that write text, and this is an encoder",
            "leave it out, and lend more threads in its place",
        )
    if is_encoder and spec.compile != "off":
        raise refused(
            "compile", "compiled code is for models that write text, and this is an encoder", "leave it out"
        )
    check_ranks(spec.parallelism.tensor, config)
    check_divided(spec.parallelism.tensor, config, processes)
    check_length(spec.max_seq, model_window(folder, config, is_stretched=True))


def _no_served_model(job_id: str, store: Store) -> UserError:
    job = store.jobs.get(job_id).spec
    what = (
        f"a model of declared layers ({job.model_task})"
        if isinstance(job, TrainJob)
        else "a model of another kind"
    )
    return refused(
        "model.job",
        f"job {job_id} trained {what}; only language models and encoders of transformers can be served",
        "name a job that trained one of these",
    )


def check_length(max_seq: int | None, window: int | None) -> None:
    """Raise UserError if sequences are longer than the model's window; skip the check if either is None."""
    if window is not None and max_seq is not None and max_seq > window:
        raise refused(
            "max_seq",
            f"{max_seq} tokens are more than the {window} that the model was made for",
            f"ask for at most {window}, or leave it out",
        )
