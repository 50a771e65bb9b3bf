"""The Hugging Face configuration of a job's model, from the job or from the model's folder.

This module does not import torch.
"""

from __future__ import annotations

import json
from typing import Any

from share_compute.errors import UserError
from share_compute.specification import ModelSpec


def declared_config(model: ModelSpec) -> dict[str, Any]:
    """Return a model's configuration; an empty dict for a list of layers, which has no configuration.

    Raises:
        UserError: the model's folder or its config.json cannot be read.
    """
    if model.path is None:
        return dict(model.config or {})
    if not model.path.is_dir():
        raise UserError(
            f"model folder {model.path} does not exist on the server",
            hint="give the path of a Hugging Face folder that the server can read",
        )
    file = model.path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise UserError(
            f"{file} cannot be read: {failure}", hint="give a folder that save_pretrained wrote"
        ) from failure
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object", hint="give a folder that save_pretrained wrote")
    return config


def model_vocab_size(model: ModelSpec) -> int | None:
    """Return the vocabulary size of a model; None if its configuration has none.

    Raises:
        UserError: the model's folder or its config.json cannot be read, or the size is not a positive integer.
    """
    config = declared_config(model)
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise UserError(f"the model's vocab_size is {size!r}", hint="make it a positive whole number")
    return size
