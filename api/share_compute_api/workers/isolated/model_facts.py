"""Reads the facts about a model from its folder, for the catalogue. The size of everything that is read is limited."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Final

from share_compute.data.tokenization import has_chat_template, has_tokenizer
from share_compute.errors import UserError
from share_compute.files.folder_facts import FolderFacts
from share_compute.files.json_files import read_json_file
from share_compute.models.huggingface.encoder_types import encoder_window, pooling_of
from share_compute.models.huggingface.licence import licence_in
from share_compute.models.huggingface.sizes import WINDOW_KEYS, whole_number
from share_compute.quantities import bytes_text
from share_compute_api.workers.isolated.weight_index import (
    INDEX,
    MOST_WEIGHT_FILES,
    WeightHeaders,
    weight_files,
)

_MOST_INDEX_BYTES: Final = 16 << 20
_MOST_NAME: Final = 100


def model_facts(folder: Path) -> FolderFacts:
    """Return the facts about the model in a folder.

    Args:
        folder: folder of a Hugging Face model.

    Raises:
        UserError: the folder holds no model that can be served; the error says why.
    """
    config = _config(folder)
    names = _weight_names(folder)
    parameters = _parameters(folder, names)
    if not has_tokenizer(folder):
        raise UserError(
            "the folder has no tokenizer", hint="copy tokenizer.json and tokenizer_config.json into it"
        )
    is_encoder = pooling_of(folder, config) is not None
    return FolderFacts(
        kind="embed" if is_encoder else "generate",
        architecture=_architecture(config),
        parameters=parameters,
        weights_bytes=sum((folder / name).stat().st_size for name in names),
        window_tokens=encoder_window(config) if is_encoder else whole_number(config, *WINDOW_KEYS),
        has_chat_template=has_chat_template(folder),
        licence=licence_in(folder),
    )


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                "the folder holds adapters, not a whole model",
                hint="train with training.lora.merge, or merge them into their model with peft",
            )
        raise UserError("the folder has no config.json", hint="name the folder of a Hugging Face model")
    config = read_json_file(file, dict)
    if not isinstance(config.get("model_type"), str):
        raise UserError("config.json has no model_type", hint="use a model of transformers")
    return config


def _architecture(config: dict[str, Any]) -> str:
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    name = first if isinstance(first, str) and first else str(config["model_type"])
    return "".join(character for character in name if character.isprintable())[:_MOST_NAME]


def _weight_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the files of weights; raise UserError if one is missing."""
    if (folder / INDEX).is_file():
        _require_size(folder / INDEX, _MOST_INDEX_BYTES)
        names = weight_files((folder / INDEX).read_text(encoding="utf-8"), "the model")
        if any(Path(name).name != name for name in names):
            raise UserError(f"{INDEX} names files of other folders", hint="save the model again")
    else:
        names = tuple(sorted(file.name for file in folder.glob("model*.safetensors")))
    if len(names) > MOST_WEIGHT_FILES:
        raise UserError(f"there are {len(names)} files of weights", hint="save the model in fewer files")
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing is not None or not names:
        raise UserError(
            f"the folder lacks {missing or 'model.safetensors'}", hint="copy all files of the model into it"
        )
    return names


def _parameters(folder: Path, names: tuple[str, ...]) -> int:
    """Return the number of values in files of weights, from their headers."""
    number, headers = 0, WeightHeaders("copy the weights again")
    for name in names:
        with (folder / name).open("rb") as file:
            header = headers.read(file)
            data_bytes = os.fstat(file.fileno()).st_size - file.tell()
        try:
            number += _values_in(json.loads(header), data_bytes)
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as failure:
            raise UserError(f"{name} is damaged", hint="copy or download it again") from failure
    return number


def _values_in(header: dict[str, Any], size_bytes: int) -> int:
    """Return the number of values that a header declares; raise ValueError unless they fill ``size_bytes``."""
    tensors = [tensor for key, tensor in header.items() if key != "__metadata__"]
    if max((tensor["data_offsets"][1] for tensor in tensors), default=0) != size_bytes:
        raise ValueError("the file is too short or too long")
    number = sum(math.prod(map(int, tensor["shape"])) for tensor in tensors)
    # No type has less than 4 bits.
    if not 0 <= number <= 2 * size_bytes:
        raise ValueError("the shapes do not fit the data")
    return number


def _require_size(file: Path, most_bytes: int) -> None:
    if file.is_file() and file.stat().st_size > most_bytes:
        size_bytes = file.stat().st_size
        raise UserError(
            f"{file.name} has {bytes_text(size_bytes)}; at most {bytes_text(most_bytes)} are read",
            hint="use the files that the model was published with",
        )
