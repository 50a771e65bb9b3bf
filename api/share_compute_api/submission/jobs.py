"""Fast checks of a training job before it is queued. They do not load the model's weights."""

from __future__ import annotations

from typing import Any

from share_compute.planning.search.partitioning import load_strategy
from share_compute.specification import DataSpec, TrainJob
from share_compute.specification.paths import DATA_FIELDS
from share_compute_api.submission.model_folders import (
    LAYER_KEYS,
    Problems,
    check_model_folder,
    check_stages,
    check_token_ids,
    checking,
    largest_token_id,
    read_json,
    refused,
    require_path,
    whole_number,
)
from share_compute_api.workers.isolated.messages import CheckInputs, CheckModel, CheckTables
from share_compute_api.workers.isolated.pool import IsolatedProcesses


def check_job(spec: TrainJob, processes: IsolatedProcesses) -> None:
    """Check a training job's strategy, files, model and tokenizer, without regard to the cluster's machines.

    Args:
        spec: the job.
        processes: isolated processes, which read the job's files, configuration and tokenizer.

    Raises:
        UserError: the job cannot run; the error names each invalid field.
    """
    problems = Problems()
    with problems.noted("parallelism.strategy"):
        load_strategy(spec.parallelism.strategy)
    with problems.noted():
        _check_files(spec.data, processes)
    with problems.noted():
        check_model(spec, processes)
    problems.require_none()


def _check_files(data: DataSpec, processes: IsolatedProcesses) -> None:
    problems = Problems()
    for field in DATA_FIELDS:
        for file in getattr(data, field.removeprefix("data.")) or ():
            with problems.noted(), checking(field):
                require_path(file, field)
                if data.images is not None:
                    if not file.is_dir():
                        raise refused(field, f"{file} is not a folder", "name each folder of images")
                    continue
                if not file.is_file():
                    raise refused(field, f"{file} is not a file", "name each file of the data")
                if not file.stat().st_size:
                    raise refused(field, f"{file} is empty", "leave it out, or fill it")
    problems.require_none()
    if data.table is not None:
        with problems.noted("data.table"):
            processes.ask(CheckTables(files=data.all_files, table=data.table))
        problems.require_none()
        return
    if data.files is None or data.images is not None or data.files[0].suffix == ".txt":
        return
    question = CheckInputs(files=data.files, column=data.text_column, holds="text", taken=(), is_united=False)
    with problems.noted("data.text_column"):
        processes.ask(question)
    problems.require_none()


def check_model(spec: TrainJob, processes: IsolatedProcesses) -> None:
    """Check that a training job's model and tokenizer exist and fit each other and the job.

    Args:
        spec: the job.
        processes: isolated processes, which read the configuration and the tokenizer.

    Raises:
        UserError: a check failed; the error names each invalid field.
    """
    problems = Problems()
    with problems.noted(), checking("tokenizer.path"):
        if spec.tokenizer.path is not None:
            require_path(spec.tokenizer.path, "tokenizer.path")
            if not spec.tokenizer.path.is_dir():
                problem = f"{spec.tokenizer.path} is not a folder"
                raise refused("tokenizer.path", problem, "name the folder that holds tokenizer.json")
    with problems.noted(), checking("model.path"):
        if spec.model.path is not None:
            check_model_folder(spec.model.path, "model.path")
        config = _config(spec)
        if spec.model.layers is None:
            with problems.noted("model.path" if spec.model.path else "model.config"):
                processes.ask(CheckModel(config=config))
        with problems.noted():
            _check_vocabulary(spec, config, processes)
        with problems.noted():
            layers = whole_number(config, *LAYER_KEYS)
            check_stages(
                spec.parallelism.stages, layers if spec.model.layers is None else len(spec.model.layers)
            )
    problems.require_none()


def _check_vocabulary(spec: TrainJob, config: dict[str, Any], processes: IsolatedProcesses) -> None:
    vocab_size = whole_number(config, "vocab_size")
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
        check_token_ids(largest_token_id(folder, field, processes), vocab_size, field)


def _config(spec: TrainJob) -> dict[str, Any]:
    if spec.model.path is not None:
        return read_json(spec.model.path / "config.json", "model.path")
    return spec.model.config or {}
