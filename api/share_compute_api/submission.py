"""Cheap checks of a job before it is queued: what can be seen on disk without loading a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from share_compute.errors import UserError
from share_compute.planning.partitioning import load_strategy
from share_compute.specification import TrainJob


def check_job(spec: TrainJob) -> None:
    """Raise UserError, naming the field, when the job cannot run here whatever machines there are."""
    load_strategy(spec.parallelism.strategy)
    for file in spec.data.files or ():
        _exists(file, "data.files")
        if not file.is_file():
            raise _refused("data.files", f"{file} is not a file", "name each file of the data")
    if spec.model.path is not None:
        _check_model_folder(spec.model.path)
    if spec.tokenizer.path is not None:
        _exists(spec.tokenizer.path, "tokenizer.path")
        if not spec.tokenizer.path.is_dir():
            problem = f"{spec.tokenizer.path} is not a folder"
            raise _refused("tokenizer.path", problem, "name the folder that holds tokenizer.json")
    _check_vocabulary(spec)


def _refused(field: str, problem: str, mend: str) -> UserError:
    return UserError(
        f"{field}: {problem}", mend=mend, details={"fields": [{"field": field, "problem": problem}]}
    )


def _exists(path: Path, field: str) -> None:
    if not path.is_absolute():
        raise _refused(field, f"{path} is a relative path", "write paths on the server in full")
    try:
        found = path.exists()
    except (OSError, ValueError) as failure:
        raise _refused(field, f"{path!s} cannot be looked at: {failure}", "write another path") from failure
    if not found:
        raise _refused(
            field, f"{path} does not exist on the server", "copy it to the server, or mend the path"
        )


def _check_model_folder(folder: Path) -> None:
    _exists(folder, "model.path")
    if not (folder / "config.json").is_file():
        raise _refused(
            "model.path", f"{folder} has no config.json", "name the folder of a Hugging Face model"
        )
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")):
        raise _refused(
            "model.path",
            f"{folder} has .bin weights only, which could run code when they are read",
            "convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    raise _refused("model.path", f"{folder} has no *.safetensors", "copy the weights into the folder")


def _check_vocabulary(spec: TrainJob) -> None:
    vocab_size = _model_vocab_size(spec)
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


def _model_vocab_size(spec: TrainJob) -> int | None:
    config = spec.model.config
    if spec.model.path is not None:
        config = _read_json(spec.model.path / "config.json", "model.path")
    if config is None:
        return None
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def _largest_token_id(spec: TrainJob) -> int | None:
    folder = spec.tokenizer.path or spec.model.path
    if folder is None or spec.tokenizer.vocab_size is not None or not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    except Exception as failure:  # the library raises bare Exception for every file that it cannot read
        field = "tokenizer.path" if spec.tokenizer.path else "model.path"
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
