"""Checks model configurations with transformers. This module does not import torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from share_compute.errors import UserError
from share_compute.files.strict import suggestion
from share_compute.models.configuration import ENCODER_LAYERS, is_trainable_encoder
from share_compute.models.image_types import require_image_model
from share_compute.specification import Task

MOST_LAYERS = 1_000
"""Maximum number of layers of a model. To build many more takes minutes, also without memory for their weights."""
_TYPE = re.compile(r"(?:TypeError: )?Field '(\w+)' expected (\w+), got \w+(?: \(value: (.*)\))?")
_ODD_HEADS = "RoPE requires an even rotary dimension"
"""Beginning of the error of transformers for a width of heads that rotary positions cannot divide into pairs."""
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "list": "a list",
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head")
_TYPING_ERROR = 0.88
"""Similarity from which an unknown key is taken for a typing error."""
_LONGEST_KEY = 100
"""Length of the longest key that is compared with others; no architecture has a key as long as this."""
_MOST_COMPARED = 100
"""Number of unknown keys that are compared; files of old releases of transformers have some tens of them."""
_CHECK = "check model.config against the architecture's documentation in transformers"


def hub_configuration(config: Mapping[str, Any]) -> PretrainedConfig:
    """Return a declared configuration with all defaults of its architecture.

    Raises:
        UserError: the architecture is unknown, a value is not allowed, or the model has more than `MOST_LAYERS` layers.
    """
    options = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype", "auto_map")}
    if str(config.get("model_type")) not in CONFIG_MAPPING:
        raise UserError(
            f"unknown model_type {config.get('model_type')!r}"
            + suggestion(str(config.get("model_type")), [*CONFIG_MAPPING]),
            hint="use a model_type that transformers knows, e.g. llama",
        )
    # Configurations of some architectures list all layers, so the number is checked before they are made.
    for part in (config, *config.values()):
        for name in _LAYERS if isinstance(part, Mapping) else ():
            _require_few_layers(name, part.get(name))
    try:
        made: PretrainedConfig = AutoConfig.for_model(**options)
    except (StrictDataclassError, TypeError, ValueError) as failure:
        _require_whole_heads(config)
        raise UserError(f"model.config is wrong: {on_one_line(failure)}", hint=_CHECK) from failure
    text = made.get_text_config()
    _require_few_layers("num_hidden_layers", getattr(text, "num_hidden_layers", None))
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value < 1:
            raise UserError(
                f"model.config is wrong: {name} is {value}", hint=f"set {name} to 1 or more in model.config"
            )
    inner = config.get("text_config")
    declared = {**config, **(inner if isinstance(inner, Mapping) else {})}
    _require_known_keys(declared, made)
    # The default of head_dim fits the default hidden_size, so head_dim counts only if the configuration declares it.
    widths = {name: getattr(text, name, None) for name in ("hidden_size", "num_attention_heads")}
    _require_whole_heads({**widths, "head_dim": declared.get("head_dim")})
    return made


def _require_known_keys(declared: Mapping[str, Any], made: PretrainedConfig) -> None:
    """Raise `UserError` for a key that is probably a misspelling of a missing key of the architecture.

    Configurations of transformers ignore unknown keys. Many files have obsolete keys, which do not resemble present
    ones.
    """
    known: set[str] = set()
    for part in (made, made.get_text_config()):
        known |= {*(field.name for field in fields(type(part))), *part.attribute_map}
    unknown = [key for key in declared if key not in known and len(key) <= _LONGEST_KEY]
    for key in unknown[:_MOST_COMPARED]:
        near = difflib.get_close_matches(key, known, n=1, cutoff=_TYPING_ERROR)
        if near and near[0] not in declared:
            raise UserError(
                f"model.config is wrong: unknown key {key!r}; did you mean {near[0]!r}?", hint="fix this key"
            )


def _require_whole_heads(config: Mapping[str, Any]) -> None:
    """Raise `UserError` if the hidden size cannot be divided among the attention heads.

    A configuration with ``head_dim`` sets the width of a head, whatever the hidden size.
    """
    width = next((config[name] for name in _WIDTHS if config.get(name) is not None), None)
    heads = next((config[name] for name in _HEADS if config.get(name) is not None), None)
    if not (isinstance(width, int) and isinstance(heads, int)) or heads < 1:
        return
    if width % heads and config.get("head_dim") in (None, width // heads):
        raise UserError(
            f"model.config is wrong: hidden_size {width} is not a multiple of num_attention_heads {heads}",
            hint=f"set hidden_size to {width // heads * heads or heads} or {(width // heads + 1) * heads}",
        )


def _require_few_layers(name: str, value: object) -> None:
    if isinstance(value, int | float) and value > MOST_LAYERS:
        raise UserError(
            f"model.config is wrong: {name} is {value}; at most {MOST_LAYERS} are possible",
            hint=f"set {name} to {MOST_LAYERS} or less in model.config",
        )


def check_trainable(config: Mapping[str, Any], task: Task = "language_model") -> None:
    """Check that a configuration describes a model that can be trained.

    Args:
        config: configuration of the model.
        task: task of the job.

    Raises:
        UserError: the configuration is invalid, the model is not a causal language model with a pipeline plan, it has
            no head for the task, or its number of attention heads is not a multiple of its number of key-value heads.
    """
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 - the names alone; imports no torch
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    made = hub_configuration(config)
    if task == "image_classification":
        require_image_model(config)
        return
    reads_text = task in ("text_classification", "embedding")
    if reads_text and is_trainable_encoder(config):
        return
    text = made.get_text_config()
    if config.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        encoders = f", or one of the encoders {', '.join(ENCODER_LAYERS)}" if reads_text else ""
        raise UserError(
            f"architecture {config.get('model_type')!r} is no causal language model",
            hint=f"train a model that writes text, such as llama, qwen3 or mistral{encoders}",
        )
    has_head = config.get("model_type") in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if task == "text_classification" and not has_head:
        raise UserError(
            f"architecture {config.get('model_type')!r} has no head for classes of texts in transformers",
            hint="choose an architecture with AutoModelForSequenceClassification, such as llama, qwen3 or mistral",
        )
    if not any(getattr(one, "base_model_pp_plan", None) for one in (made, text)):
        raise no_pipeline_plan(str(config.get("model_type")))
    heads, groups = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise UserError(
            f"model.config is wrong: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}",
            hint=_CHECK,
        )


def no_pipeline_plan(model_type: str) -> UserError:
    """Return the error for an architecture without a pipeline plan."""
    return UserError(
        f"architecture {model_type!r} declares no pipeline plan",
        hint="choose an architecture that has base_model_pp_plan, such as llama, qwen3 or mistral",
    )


def on_one_line(failure: BaseException) -> str:
    """Return an exception's message as one line of at most 300 characters, without the validator's name."""
    line = " ".join(str(failure).split())
    line = re.sub(r"^(?:Class v|V)alidation error for (?:validator|field) '\w+': (\w+: )?", "", line)
    if line.startswith(_ODD_HEADS):
        return "the width of a head, hidden_size / num_attention_heads, must be even"
    found = _TYPE.fullmatch(line)
    if found is not None:
        line = f"{found[1]} must be {_TYPES.get(found[2], found[2])}, not {found[3] or 'of another type'}"
    return line[:300]
