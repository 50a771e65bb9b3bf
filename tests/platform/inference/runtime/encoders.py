"""Small encoders with random weights, the results of transformers for them, and stages that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel

from share_compute.inference.runtime.encoder_stage import EncoderStage
from share_compute.inference.scheduler.engine_steps import Chunk, EngineStep, Pooled
from share_compute.models.huggingface.encoder_types import Pooling
from share_compute.shards import Shard

CPU = torch.device("cpu")
LAYERS = 3
VOCABULARY = 160
POSITIONS = 64
PADDING = 1
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "pad_token_id": PADDING, "bos_token_id": 0,
    "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "bert": {},
    "camembert": {},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": LAYERS, "n_heads": 4},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "mpnet": {},
    "roberta": {},
    "xlm-roberta": {},
}  # fmt: skip
"""All kinds that are served: absolute, relative and rotary positions; windows; one with its own attention code."""


@cache
def encoder_config(model_type: str) -> dict[str, Any]:
    names = {"distilbert": ("vocab_size", "max_position_embeddings", "pad_token_id")}.get(model_type, SMALL)
    options = {name: SMALL[name] for name in names} | OPTIONS[model_type]
    return {**AutoConfig.for_model(model_type, **options).to_dict(), "model_type": model_type}


def encoder_of(model_type: str, device: torch.device = CPU) -> Any:
    """Return transformers' model, with weights large enough that vectors differ clearly."""
    return _encoder_of(model_type, device)


@cache
def _encoder_of(model_type: str, device: torch.device) -> Any:
    if device != CPU:
        return deepcopy(encoder_of(model_type)).to(device)
    model = AutoModel.from_config(AutoConfig.for_model(**encoder_config(model_type)), dtype=torch.float32)
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.3)
    return model.requires_grad_(requires_grad=False).eval()


def hidden_states(model_type: str, text: Sequence[int], device: torch.device = CPU) -> Any:
    """Return the hidden states that transformers computes of one text alone, ``[tokens, hidden]``."""
    ids = torch.tensor([text], device=device)
    return encoder_of(model_type, device)(
        input_ids=ids, attention_mask=torch.ones_like(ids)
    ).last_hidden_state[0]


def stage_of(
    model_type: str,
    cut: tuple[int, int],
    pooling: Pooling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> EncoderStage:
    """Return a stage without weights."""
    return EncoderStage(
        encoder_config(model_type),
        Shard("m", *cut, LAYERS),
        device,
        dtype,
        window_tokens=POSITIONS,
        pooling=pooling or Pooling(),
    )


def filled(stage: EncoderStage, model_type: str) -> EncoderStage:
    state = encoder_of(model_type).state_dict()
    with torch.no_grad():
        for name, tensor in stage.tensors().items():
            tensor.copy_(state[name])
    stage.seal()
    return stage


def vectors(stages: Sequence[EncoderStage], texts: Sequence[Sequence[int]]) -> Any:
    """Compute texts in one step; return their vectors ``[texts, hidden]``."""
    chunks = tuple(
        Chunk(number, 0, len(text), tuple(text), samples=True) for number, text in enumerate(texts)
    )
    step = EngineStep(0, 0, 0, (), (), chunks)
    given: Any = torch.tensor(step.input_ids({}), dtype=torch.int64)
    for stage in stages:
        given = stage.compute(step, given)
    assert all(isinstance(one, Pooled) for one in given)
    assert [(one.sequence, one.position) for one in given] == list(enumerate(map(len, texts)))
    return torch.from_numpy(np.stack([np.frombuffer(one.vector, "<f4") for one in given]))


def text_of(length: int, seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=source).tolist()
