"""Cheap checks of a job before it is queued: what can be seen on disk without loading a model."""

from __future__ import annotations

from typing import Any

from share_compute.planning.partitioning import load_strategy
from share_compute.specification import TrainJob
from share_compute_api.isolated.pool import IsolatedProcesses
from share_compute_api.model_folders import (
    LAYER_KEYS,
    check_model_folder,
    check_pools,
    check_token_ids,
    largest_token_id,
    looking,
    read_json,
    refused,
    require_path,
    whole_number,
)


def check_job(spec: TrainJob, processes: IsolatedProcesses) -> None:
    """Raise UserError, naming the field, when the job cannot run here whatever machines there are.

    Args:
        spec: the job.
        processes: read its tokenizer.
    """
    load_strategy(spec.parallelism.strategy)
    with looking("data.files"):
        for file in spec.data.files or ():
            require_path(file, "data.files")
            if not file.is_file():
                raise refused("data.files", f"{file} is not a file", "name each file of the data")
    check_model(spec, processes)


def check_model(spec: TrainJob, processes: IsolatedProcesses) -> None:
    """Raise UserError, naming the field, when the model or its tokenizer cannot be what the job says.

    Args:
        spec: the job.
        processes: read its tokenizer.
    """
    with looking("model.path"):
        if spec.model.path is not None:
            check_model_folder(spec.model.path, "model.path")
    with looking("tokenizer.path"):
        if spec.tokenizer.path is not None:
            require_path(spec.tokenizer.path, "tokenizer.path")
            if not spec.tokenizer.path.is_dir():
                problem = f"{spec.tokenizer.path} is not a folder"
                raise refused("tokenizer.path", problem, "name the folder that holds tokenizer.json")
    _check_vocabulary(spec, processes)
    check_pools(spec.parallelism.pools, _num_layers(spec))


def _num_layers(spec: TrainJob) -> int | None:
    """Return the layers of the model; None where its configuration leaves that to a default."""
    if spec.model.layers is not None:
        return len(spec.model.layers)
    return whole_number(_config(spec), *LAYER_KEYS)


def _check_vocabulary(spec: TrainJob, processes: IsolatedProcesses) -> None:
    vocab_size = whole_number(_config(spec), "vocab_size")
    if vocab_size is None:
        return
    wanted = spec.tokenizer.vocab_size
    if wanted is not None and wanted > vocab_size:
        raise refused(
            "tokenizer.vocab_size",
            f"a tokenizer of {wanted} ids does not fit a model of {vocab_size}",
            "give the model a larger vocab_size, or the tokenizer a smaller one",
        )
    folder = spec.tokenizer.path or spec.model.path
    if folder is not None and wanted is None:
        field = "tokenizer.path" if spec.tokenizer.path else "model.path"
        check_token_ids(largest_token_id(folder, field, processes), vocab_size, "tokenizer.path")


def _config(spec: TrainJob) -> dict[str, Any]:
    if spec.model.path is not None:
        return read_json(spec.model.path / "config.json", "model.path")
    return spec.model.config or {}
