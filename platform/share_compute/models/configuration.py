"""The Hugging Face configuration of a job's model, from the job or from the model's folder.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from share_compute.errors import UserError
from share_compute.files.json_files import read_json_file
from share_compute.specification import ModelSpec
from share_compute.specification.layers import EMBEDDINGS

ENCODER_LAYERS: Mapping[str, str] = {
    "bert": "encoder.layer",
    "camembert": "encoder.layer",
    "distilbert": "transformer.layer",
    "roberta": "encoder.layer",
    "xlm-roberta": "encoder.layer",
}
"""Path of the list of layers inside the base model of an encoder, by ``model_type``.

In transformers, encoders declare no pipeline plan. So this lists the encoders that can be trained: they pass nothing
but hidden states and the mask of padding between their layers.
"""
_COUNTS_FROM_PADDING = ("camembert", "roberta", "xlm-roberta")
"""Architectures whose position ids start after the id of the padding token, which leaves fewer positions."""
_HAS_TOKEN_TYPES = ("bert",)
"""Architectures that mark the second text of a pair with another token type."""


def declared_config(model: ModelSpec) -> dict[str, Any]:
    """Return a model's configuration; an empty dict for a list of layers, which has no configuration.

    Raises:
        UserError: the model's folder or its config.json cannot be read, or the model is on the Hub and was not fetched.
    """
    if model.path is None:
        if model.hub is not None and model.config is None:
            raise UserError(
                f"the configuration of {model.hub} is on the Hub, not on this machine",
                hint="plan it on the server (without --topology), or download the model and give model.path",
            )
        return dict(model.config or {})
    if not model.path.is_dir():
        raise UserError(
            f"model folder {model.path} does not exist on the server",
            hint="give the path of a Hugging Face folder that the server can read",
        )
    file = model.path / "config.json"
    return read_json_file(file, dict, shown=str(file))


def require_no_auxiliary_loss(config: Mapping[str, Any]) -> None:
    """Raise UserError if a configuration of a mixture of experts requests the auxiliary loss of its routers.

    transformers computes this loss from the routers of all layers together. No stage of a cut model has all of them.
    """
    text = config.get("text_config")
    if config.get("output_router_logits") or (isinstance(text, dict) and text.get("output_router_logits")):
        raise UserError(
            "output_router_logits: the auxiliary loss that balances the load of experts is not supported in training",
            hint="set output_router_logits to false in the model's configuration; the task's loss then trains the "
            "routers alone",
        )


def model_vocab_size(model: ModelSpec) -> int | None:
    """Return the vocabulary size of a model; None if neither its configuration nor its first embedding has one.

    Raises:
        UserError: the model's folder or its config.json cannot be read, or the size is not a positive integer.
    """
    for layer in model.layers or ():
        if layer.type in EMBEDDINGS:
            rows = layer.options.get("num_embeddings")
            return rows if type(rows) is int else None
    config = declared_config(model)
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise UserError(f"the model's vocab_size is {size!r}", hint="make it a positive whole number")
    return size


def is_trainable_encoder(config: Mapping[str, Any] | None) -> bool:
    """Return whether a configuration describes an encoder that can be trained to classify or embed texts."""
    return config is not None and config.get("model_type") in ENCODER_LAYERS and not config.get("is_decoder")


def require_positions(config: Mapping[str, Any], length: int, padding: int | None) -> None:
    """Check that an encoder has a position for each token of a text.

    Args:
        config: configuration of the encoder.
        length: number of tokens of a text, with padding.
        padding: id of the padding token; None before the data is read.

    Raises:
        UserError: the texts are longer.
    """
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or config.get("model_type") not in _COUNTS_FROM_PADDING:
        return
    window = positions - 1 - (padding or 0)
    if length > window:
        raise UserError(
            f"sequence_length {length} is longer than the model's window of {window} tokens",
            hint=f"set training.sequence_length to {window} or less",
        )


def require_single_texts(config: Mapping[str, Any] | None, pair: str | None) -> None:
    """Check that an encoder does not need token types for pairs of texts, which samples do not have.

    Args:
        config: configuration of the model.
        pair: field ``data.labels.pair`` of the job.

    Raises:
        UserError: samples are pairs, and the encoder distinguishes their texts by token types.
    """
    kind = (config or {}).get("model_type")
    if pair is not None and kind in _HAS_TOKEN_TYPES:
        raise UserError(
            f"data.labels.pair: architecture {kind!r} distinguishes the texts of a pair by token types, which samples "
            "do not have",
            hint="choose roberta or distilbert, or put both texts into one column",
        )
