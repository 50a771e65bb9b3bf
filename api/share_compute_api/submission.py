"""Cheap checks of a job before it is queued: what can be seen on disk without loading a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from share_compute.errors import UserError
from share_compute.planning.partitioning import load_strategy
from share_compute.specification import TrainJob

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What configurations of Hugging Face call the number of layers."""


def check_job(spec: TrainJob) -> None:
    """Raise UserError, naming the field, when the job cannot run here whatever machines there are."""
    load_strategy(spec.parallelism.strategy)
    with _looking("data.files"):
        for file in spec.data.files or ():
            _exists(file, "data.files")
            if not file.is_file():
                raise _refused("data.files", f"{file} is not a file", "name each file of the data")
    check_model(spec)


def check_model(spec: TrainJob) -> None:
    """Raise UserError, naming the field, when the model or its tokenizer cannot be what the job says."""
    with _looking("model.path"):
        if spec.model.path is not None:
            _check_model_folder(spec.model.path)
    with _looking("tokenizer.path"):
        if spec.tokenizer.path is not None:
            _exists(spec.tokenizer.path, "tokenizer.path")
            if not spec.tokenizer.path.is_dir():
                problem = f"{spec.tokenizer.path} is not a folder"
                raise _refused("tokenizer.path", problem, "name the folder that holds tokenizer.json")
    _check_vocabulary(spec)
    _check_pools(spec)


@contextmanager
def _looking(field: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as failure:
        raise _refused(
            field, f"it cannot be looked at: {failure}", "mend its rights, or the path"
        ) from failure


def _refused(field: str, problem: str, mend: str) -> UserError:
    return UserError(
        f"{field}: {problem}", mend=mend, details={"fields": [{"field": field, "problem": problem}]}
    )


def _exists(path: Path, field: str) -> None:
    if not path.is_absolute():
        raise _refused(field, f"{path} is a relative path", "write paths on the server in full")
    if not path.exists():
        raise _refused(
            field, f"{path} does not exist on the server", "copy it to the server, or mend the path"
        )


def _check_model_folder(folder: Path) -> None:
    _exists(folder, "model.path")
    suffixes = {file.suffix for file in folder.iterdir()}
    if not (folder / "config.json").is_file():
        raise _refused(
            "model.path", f"{folder} has no config.json", "name the folder of a Hugging Face model"
        )
    if ".safetensors" in suffixes:
        return
    if ".bin" in suffixes:
        raise _refused(
            "model.path",
            f"{folder} has .bin weights only, which could run code when they are read",
            "convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    raise _refused("model.path", f"{folder} has no *.safetensors", "copy the weights into the folder")


def _check_pools(spec: TrainJob) -> None:
    pools, layers = spec.parallelism.pools, _num_layers(spec)
    if pools is not None and layers is not None and pools > layers:
        raise _refused(
            "parallelism.pools",
            f"{pools} pools cannot share {layers} layers: each needs at least one",
            f"ask for at most {layers} pools",
        )


def _num_layers(spec: TrainJob) -> int | None:
    """Return the layers of the model; None where its configuration leaves that to a default."""
    if spec.model.layers is not None:
        return len(spec.model.layers)
    return _whole_number(spec, *_LAYER_KEYS)


def _check_vocabulary(spec: TrainJob) -> None:
    vocab_size = _whole_number(spec, "vocab_size")
    if vocab_size is None:
        return
    wanted = spec.tokenizer.vocab_size
    if wanted is not None and wanted > vocab_size:
        raise _refused(
            "tokenizer.vocab_size",
            f"a tokenizer of {wanted} ids does not fit a model of {vocab_size}",
            "give the model a larger vocab_size, or the tokenizer a smaller one",
        )
    largest = _largest_token_id(spec)
    if largest is not None and largest >= vocab_size:
        raise _refused(
            "tokenizer.path",
            f"the tokenizer has {largest + 1} ids, the model only {vocab_size}",
            "use the tokenizer that belongs to the model",
        )


def _whole_number(spec: TrainJob, *keys: str) -> int | None:
    """Return what the model's configuration says under the first of these keys that it has."""
    config: dict[str, Any] = spec.model.config or {}
    if spec.model.path is not None:
        config = _read_json(spec.model.path / "config.json", "model.path")
    text: Any = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    for part in parts:
        for key in keys:
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def _largest_token_id(spec: TrainJob) -> int | None:
    folder = spec.tokenizer.path or spec.model.path
    field = "tokenizer.path" if spec.tokenizer.path else "model.path"
    with _looking(field):
        if (
            folder is None
            or spec.tokenizer.vocab_size is not None
            or not (folder / "tokenizer.json").is_file()
        ):
            return None
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    except Exception as failure:  # the library raises bare Exception for every file that it cannot read
        raise _refused(
            field, f"tokenizer.json cannot be read: {failure}", "save the tokenizer again"
        ) from failure
    return max(vocabulary.values(), default=None)


def _read_json(path: Path, field: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise _refused(
            field, f"{path.name} cannot be read: {failure}", "mend or replace the file"
        ) from failure
    if not isinstance(data, dict):
        raise _refused(field, f"{path.name} is not a JSON object", "mend or replace the file")
    return data
