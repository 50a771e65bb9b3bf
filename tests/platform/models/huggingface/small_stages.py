"""Stages of small Hugging Face models with weights from a seed, and the configurations of encoders."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.stage import Stage
from share_compute.shards import Shard

LAYERS = 4
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "camembert": SIZES,
    "distilbert": {
        "vocab_size": 60, "dim": 32, "hidden_dim": 64, "n_layers": LAYERS, "n_heads": 4, "max_position_embeddings": 64,
    },
    "roberta": SIZES,
    "xlm-roberta": SIZES,
}  # fmt: skip


def stages(made: Blueprint, *edges: int) -> list[Stage]:
    """Return the stages of a model of `LAYERS` layers, cut at these layers, in evaluation mode."""
    found = []
    for start, stop in itertools.pairwise(edges):
        stage = build_stage(made, Shard("m", start, stop, LAYERS), torch.device("cpu"))
        stage.initialize(3)
        stage.module.eval()
        found.append(stage)
    return found


def through(parts: list[Stage], inputs: Tensor) -> Tensor:
    """Return the outputs of the last stage."""
    outputs = inputs
    for part in parts:
        outputs = part.forward(outputs)
    return outputs
