"""Fast checks of a training job before it is queued. They do not load the model's weights."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from share_compute.data.image_files import FOLDERS_HINT, has_folders
from share_compute.data.tokenization import has_tokenizer
from share_compute.files.field_errors import Problems, refused
from share_compute.models.configuration import require_single_texts
from share_compute.models.huggingface.encoder_types import trained_pooling
from share_compute.models.huggingface.sizes import LAYER_KEYS, whole_number
from share_compute.planning.search.partitioning import load_strategy
from share_compute.specification import MANIFEST_SUFFIXES, TargetSpec, TrainJob
from share_compute.specification.job import Report
from share_compute.specification.layers import LayerSpec, expanded
from share_compute.specification.paths import DATA_FIELDS
from share_compute.specification.task import RISING
from share_compute_api.submission.layer_checks import check_parallelism
from share_compute_api.submission.model_folders import (
    check_model_folder,
    check_stages,
    check_token_ids,
    checking,
    largest_token_id,
    read_json,
    require_path,
)
from share_compute_api.workers.isolated.messages import (
    CheckInputs,
    CheckManifests,
    CheckModel,
    CheckTables,
    CheckTexts,
)
from share_compute_api.workers.isolated.remembered import Asks

_CHECKED_BYTES = 1 << 16
"""Number of bytes at the beginning of a text file that are checked."""


def check_job(spec: TrainJob, processes: Asks, *, checks_layers: bool = True) -> None:
    """Check a training job's strategy, files, model and tokenizer, without regard to the cluster's machines.

    Args:
        spec: the job.
        processes: isolated processes, which read the job's files, configuration and tokenizer.
        checks_layers: whether to also check the layers against ``parallelism``, which takes seconds.

    Raises:
        UserError: the job cannot run; the error names each invalid field.
    """
    problems = Problems()
    with problems.noted("parallelism.strategy"):
        load_strategy(spec.parallelism.strategy)
    with problems.noted():
        _check_target(spec.training.target)
    with problems.noted():
        check_data(spec, processes)
    with problems.noted():
        check_model(spec, processes)
    for report in spec.report:
        with problems.noted():
            _check_report(report)
    problems.require_none()
    if checks_layers:
        check_parallelism(spec, config_of(spec), processes)


def _check_target(target: TargetSpec | None) -> None:
    """Raise UserError for a target that no validation can reach."""
    if target is not None and target.metric in RISING and target.value > 1:
        raise refused(
            "training.target.value",
            f"{target.metric} is at most 1, and the target is {target.value:g}",
            "write 0.95 for 95%",
        )


def _check_report(report: Report) -> None:
    if find_spec(report) is None:
        raise refused(
            "report",
            f"{report} is not installed on the server",
            f"let the operator install it: pip install 'share-compute[{report}]'",
        )


def check_data(spec: TrainJob, processes: Asks) -> None:
    """Check the data of each task of a job.

    Args:
        spec: the job.
        processes: isolated processes, which read the files.

    Raises:
        UserError: a file is missing or cannot be used; the error names each invalid field.
    """
    problems = Problems()
    for place, single in enumerate(spec.single_tasks):
        with problems.noted():
            _check_files(single, processes, f"tasks.{place}." if place else "")
    problems.require_none()


def _check_files(single: TrainJob, processes: Asks, prefix: str) -> None:
    """Check the files of a job with one task; ``prefix`` precedes the names of its fields."""
    data = single.data
    problems = Problems()
    for name in DATA_FIELDS:
        field = prefix + name
        for file in getattr(data, name.removeprefix("data.")) or ():
            with problems.noted(), checking(field):
                _check_file(file, field, is_folder=data.images is not None)
    problems.require_none()
    if data.table is not None:
        with problems.noted(f"{prefix}data.table"):
            tables = CheckTables(
                files=data.all_files,
                table=data.table,
                target_is_class=single.resolved_task == "tabular_classification",
                in_features=_first_width(single.model.layers),
            )
            processes.ask(tables)
        problems.require_none()
        return
    manifests = tuple(file for file in data.all_files if file.suffix in MANIFEST_SUFFIXES)
    if data.images is not None and manifests:
        with problems.noted(f"{prefix}data.images"):
            processes.ask(CheckManifests(files=manifests))
        problems.require_none()
        return
    if data.text_columns:
        with problems.noted(f"{prefix}data.{'labels' if data.labels is not None else 'pairs'}"):
            processes.ask(CheckTexts(files=data.all_files, data=data))
        problems.require_none()
        return
    if data.files is None or data.images is not None or data.files[0].suffix == ".txt":
        return
    question = CheckInputs(
        files=data.all_files, column=data.text_column, holds="text", taken=(), is_united=False
    )
    with problems.noted(f"{prefix}data.text_column"):
        processes.ask(question)
    problems.require_none()


def _first_width(layers: Sequence[LayerSpec] | None) -> int | None:
    """Return the number of inputs of the first declared layer, if it is linear."""
    if not layers or layers[0].type != "linear":
        return None
    width = layers[0].options.get("in_features")
    return width if isinstance(width, int) else None


def _check_file(file: Path, field: str, *, is_folder: bool) -> None:
    """Check one file of the data; ``is_folder`` says whether it must be a folder of images, or a manifest."""
    require_path(file, field)
    if is_folder and file.suffix not in MANIFEST_SUFFIXES:
        if not file.is_dir():
            raise refused(
                field, f"{file} is not a folder", "name folders of images, and manifests (.csv, .jsonl)"
            )
        if not has_folders(file):
            raise refused(field, f"{file} has no folders of classes", FOLDERS_HINT)
        return
    if not file.is_file():
        raise refused(field, f"{file} is not a file", "name each file of the data")
    if not file.stat().st_size:
        raise refused(field, f"{file} is empty", "leave it out, or fill it")
    if file.suffix == ".txt":
        _require_utf8(file, field)


def _require_utf8(file: Path, field: str) -> None:
    """Raise UserError if the beginning of a file is not UTF-8 text."""
    with file.open("rb") as opened:
        start = opened.read(_CHECKED_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError as failure:
        raise refused(
            field,
            f"{file} is not UTF-8 text: byte {failure.start + 1} begins no character",
            "save it as UTF-8, or leave it out",
        ) from failure


def check_model(spec: TrainJob, processes: Asks) -> None:
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
            if not has_tokenizer(spec.tokenizer.path):
                raise refused(
                    "tokenizer.path",
                    f"{spec.tokenizer.path} has no tokenizer",
                    "name the folder that holds tokenizer.json",
                )
    with problems.noted(), checking(spec.model.folder_field):
        if spec.model.path is not None:
            check_model_folder(spec.model.path, spec.model.folder_field)
        config = config_of(spec)
        layers = whole_number(config, *LAYER_KEYS)
        if spec.model.layers is None:
            with problems.noted(spec.model.folder_field if spec.model.is_pretrained else "model.config"):
                layers = processes.ask(CheckModel(config=config, task=spec.model_task)).layers
        if spec.data.pairs is not None and spec.model.path is not None:
            with problems.noted(spec.model.folder_field):
                trained_pooling(spec.model.path, config)
        if spec.data.labels is not None:
            with problems.noted("data.labels.pair"):
                require_single_texts(config, spec.data.labels.pair)
        with problems.noted():
            _check_vocabulary(spec, config, processes)
        with problems.noted():
            check_stages(
                spec.parallelism.stages,
                layers if spec.model.layers is None else len(expanded(spec.model.layers)) + bool(spec.tasks),
            )
    problems.require_none()


def _check_vocabulary(spec: TrainJob, config: dict[str, Any], processes: Asks) -> None:
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
        field = "tokenizer.path" if spec.tokenizer.path else spec.model.folder_field
        check_token_ids(largest_token_id(folder, field, processes), vocab_size, field)


def config_of(spec: TrainJob) -> dict[str, Any]:
    """Return the configuration of the model; empty for declared layers.

    Raises:
        UserError: config.json of the model's folder cannot be read.
    """
    if spec.model.path is not None:
        return read_json(spec.model.path / "config.json", spec.model.folder_field)
    return spec.model.config or {}
