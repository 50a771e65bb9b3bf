"""Check whether a model can be cut between its layers.

Some architectures pass more than hidden states from layer to layer. Their configurations do not show this. So a small
model of the same architecture with random weights is computed both whole and stage by stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from share_compute.errors import ShareComputeError, UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.decoder import HuggingFaceStage, sketch
from share_compute.models.huggingface.hub_configuration import hub_configuration, on_one_line
from share_compute.models.huggingface.slices import LocalRing
from share_compute.shards import Shard

_GROWING_ROPE = ("dynamic", "longrope")
"""Types of rotary positions whose frequencies depend on the largest position that a layer gets."""
_LAYERS = 4
"""Number of layers of a small model, unless the real model has fewer layers or more kinds of layers."""
_TOKENS = (2, 24)
"""Shape ``[batch, seq]`` of the input of a small model."""
_VOCABULARY = 160
_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "zero_expert_num": 2,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
}  # fmt: skip
"""Settings of experts, with their values in small models."""
_WIDTHS = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "qk_head_dim": 32, "linear_head_dim": 16, "linear_num_heads": 4, "hidden_size_per_layer_input": 16,
}  # fmt: skip
"""Settings of sizes, with their values in small models."""
_DEPTHS = {"first_k_dense_replace": 1, "num_dense_layers": 1, "num_layers": 2}
"""Settings of depth, with their values in small models."""
_MOST_SCALARS = 2**27
"""Maximum number of parameters of a small model, in scalars; 512 MiB in float32."""


class _NotComputed(Exception):
    """Error: a small model cannot be computed whole."""


def no_cut_reason(config: Mapping[str, Any]) -> str | None:
    """Return the reason why a causal language model cannot be cut between its layers; None if it can.

    If no small model can be computed whole, the model counts as one that cannot be cut.

    Args:
        config: Hugging Face configuration of the model, with ``model_type``.
    """
    first: _NotComputed | None = None
    for small in _smaller(config):
        try:
            return _compared(json.dumps(small, sort_keys=True, default=str))
        except _NotComputed as failure:
            first = first or failure
    return (
        f"no small model of this configuration can be computed, to compare its stages with the whole: {first}"
    )


def require_causal(config: Mapping[str, Any]) -> None:
    """Check that a token's output does not depend on later tokens, so that padding after a text has no effect.

    Args:
        config: Hugging Face configuration of a causal language model.

    Raises:
        UserError: the output depends on later tokens, or no small model of this configuration can be computed.
    """
    first: _NotComputed | None = None
    for small in _smaller(config):
        try:
            reason = _looks_ahead(json.dumps(small, sort_keys=True, default=str))
        except _NotComputed as failure:
            first = first or failure
            continue
        if reason is None:
            return
        raise UserError(reason, hint="choose a causal architecture, such as llama, qwen3 or mistral")
    raise UserError(
        f"model: no small model of this configuration can be computed, to check that padding has no effect: {first}",
        hint="choose another architecture, such as llama, qwen3 or mistral",
    )


def require_slices(config: Mapping[str, Any]) -> None:
    """Check that the sequences of a causal language model can be cut into slices, for ``parallelism.sequence``.

    Args:
        config: Hugging Face configuration of the model.

    Raises:
        UserError: the attention has a window or another form that slices do not support, the model has dropout, or a
            small model gives other outputs in slices than as a whole.
    """
    reason = _unsliced(hub_configuration(config).get_text_config().to_dict())
    first: _NotComputed | None = None
    for small in _smaller(config) if reason is None else ():
        try:
            reason = _slices_differ(json.dumps(small, sort_keys=True, default=str))
        except _NotComputed as failure:
            first = first or failure
        else:
            break
    else:
        reason = (
            reason
            or f"no small model of this configuration can be computed, to compare slices with it: {first}"
        )
    if reason is not None:
        raise UserError(
            f"parallelism.sequence: {reason}",
            hint="set parallelism.sequence to 1, or choose plain attention without dropout, as in llama or qwen3",
        )


def _unsliced(config: Mapping[str, Any]) -> str | None:
    """Return the setting that prevents cutting sequences; None if there is none."""
    for name, value in sorted(config.items()):
        is_of_head = name.startswith(("summary_", "classifier_"))
        if "drop" in name and not is_of_head and isinstance(value, float) and value > 0:
            return f"{name} is {value}, and slices draw no random numbers: set model.config.{name} to 0"
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") in _GROWING_ROPE:
        return f"the model has rotary positions of type {rope['rope_type']}, which depend on the length of a slice"
    is_used = config.get("use_sliding_window") is not False
    window = (config.get("sliding_window") if is_used else None) or config.get("attention_chunk_size")
    kinds = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
    if kinds:
        return f"the model has layers with {kinds[0]}, which slices do not support"
    return (
        f"the model has attention in windows of {window} tokens, which slices do not support"
        if window
        else None
    )


@lru_cache(maxsize=64)
def _slices_differ(small: str) -> str | None:
    config = json.loads(small)
    ids = torch.randint(3, _VOCABULARY, _TOKENS, generator=torch.Generator().manual_seed(0))
    try:
        count = _count_layers(config)
        with torch.random.fork_rng(devices=[]):
            stage = HuggingFaceStage(
                Blueprint(config=config), Shard("check", 0, count, count), torch.device("cpu")
            )
            stage.initialize(0)
        stage.module.eval()
        with torch.no_grad():
            whole = stage.compute(ids)
    except Exception as failure:
        raise _NotComputed(on_one_line(failure)) from failure
    architecture = config["model_type"]
    try:
        stage.cut_sequences()
        tasks = {index: partial(_without_graph, stage, part) for index, part in enumerate(ids.chunk(2, 1))}
        parts = LocalRing(range(2)).run(2, tasks)
    except Exception as failure:  # noqa: BLE001 - code of the architecture
        return f"slices of architecture {architecture!r} cannot be computed: {on_one_line(failure)}"
    if torch.allclose(torch.cat([parts[0], parts[1]], 1), whole, atol=1e-4):
        return None
    return f"slices of architecture {architecture!r} do not compute what the whole sequence gives"


def _without_graph(stage: HuggingFaceStage, part: Tensor) -> Tensor:
    with torch.no_grad():
        return stage.compute(part)


@lru_cache(maxsize=64)
def _looks_ahead(small: str) -> str | None:
    config = json.loads(small)
    ids = torch.randint(3, _VOCABULARY, _TOKENS, generator=torch.Generator().manual_seed(0))
    padded = ids.clone()
    padded[:, _TOKENS[1] // 2 :] = 0
    try:
        count = _count_layers(config)
        plain, changed = (_computed(config, [0, count], each) for each in (ids, padded))
    except Exception as failure:
        raise _NotComputed(on_one_line(failure)) from failure
    half = _TOKENS[1] // 2
    if torch.allclose(plain[:, :half], changed[:, :half], atol=1e-5):
        return None
    return f"architecture {config['model_type']!r} reads later tokens, so padding would change what it says of a text"


@lru_cache(maxsize=64)
def _compared(small: str) -> str | None:
    config = json.loads(small)
    ids = torch.randint(3, _VOCABULARY, _TOKENS, generator=torch.Generator().manual_seed(0))
    try:
        count = _count_layers(config)
        whole = _computed(config, [0, count], ids)
    except Exception as failure:
        raise _NotComputed(on_one_line(failure)) from failure
    try:
        cut = _computed(config, range(count + 1), ids)
    except ShareComputeError as failure:
        return failure.message
    except Exception as failure:  # noqa: BLE001 - code of the architecture
        if '"indexer_types"' in small:  # in the configuration, or in its text_config
            return "it has sparse attention, whose layers pass the tokens that they select to the next layers"
        if '"hc_mult"' in small:
            return "its layers pass several residual streams (hc_mult) to each other, and stages exchange only one"
        return f"a stage of a small model cannot be computed alone: {on_one_line(failure)}"
    return None if torch.equal(cut, whole) else "its stages do not compute what the whole model computes"


def _count_layers(config: Mapping[str, Any]) -> int:
    """Return the model's number of layers; raise `_NotComputed` if the model is too large to run in this check."""
    size = sum(parameter.numel() for parameter in sketch(config).parameters())
    if size > _MOST_SCALARS:
        raise _NotComputed(f"it would have {size} parameters")
    return int(hub_configuration(config).get_text_config().num_hidden_layers)


def _computed(config: Mapping[str, Any], edges: Sequence[int], ids: Tensor) -> Tensor:
    """Return a model's logits, computed in stages that begin and end at successive elements of ``edges``."""
    blueprint, outputs = Blueprint(config=dict(config)), ids
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for start, stop in pairwise(edges):
            stage = HuggingFaceStage(blueprint, Shard("check", start, stop, edges[-1]), torch.device("cpu"))
            stage.initialize(0)
            stage.module.eval()
            outputs = stage.compute(outputs)
    return outputs


def _smaller(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the small configurations to try, in order. The second keeps the model's own attention sizes."""
    whole = hub_configuration(config).to_dict()
    for sizes in (_WIDTHS | _EXPERTS | _DEPTHS, _EXPERTS | _DEPTHS | {"intermediate_size": 64}):
        small = _shrunk(whole, sizes)
        if isinstance(whole.get("text_config"), dict):
            small["text_config"] = _shrunk(whole["text_config"], sizes)
        yield {**small, "model_type": config["model_type"]}


def _shrunk(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    small = {key: value for key, value in config.items() if key != "quantization_config"}
    small |= {name: size for name, size in sizes.items() if _is_size(config.get(name))}
    heads = config.get("num_attention_heads")
    if heads is not None and heads == config.get("num_key_value_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int):
        kept = _kept_layers(config, layers)
        small["num_hidden_layers"] = len(kept)
        small |= {key: [value[index] for index in kept] for key, value in _by_layer(config, layers)}
        if isinstance(own := config.get("per_layer_config"), dict):
            numbered = {int(index): _shrunk(sizes_of, sizes) for index, sizes_of in own.items()}
            small["per_layer_config"] = {
                new: numbered[old] for new, old in enumerate(kept) if old in numbered
            }
    for key, value in config.items():
        if key.startswith("vocab_size") and _is_size(value):
            small[key] = _VOCABULARY
        elif key.endswith("_token_id") and value is not None:
            small[key] = 0
    return small


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _by_layer(config: Mapping[str, Any], layers: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield the settings that are lists with one value per layer."""
    for key, value in config.items():
        if isinstance(value, list) and len(value) == layers:
            yield key, value


def _kept_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """Return the layers to keep in a small model: the first of each kind, then others up to `_LAYERS`."""
    kinds = list(zip(*(value for _, value in _by_layer(config, layers)), strict=True)) or [()] * layers
    first = {str(kind): index for index, kind in reversed([*enumerate(kinds)])}
    rest = [index for index in range(layers) if index not in first.values()]
    return sorted([*first.values(), *rest[: max(0, _LAYERS - len(first))]])
