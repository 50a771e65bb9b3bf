"""Reasons why layers do not fit: they agree with torch, and what the hint says makes the layer fit."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from share_compute.errors import UserError
from share_compute.models.blocks import MODULES, Chain, misfit
from share_compute.specification.layers import LayerSpec, PlacedLayer

BATCH, CASES = 3, 3_000


def case(draw: random.Random) -> tuple[str, dict[str, Any], list[int]]:
    """Return a kind of layer, its options, and the shape of its input."""
    shape = [BATCH, *(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))]
    window = {
        "kernel_size": draw.choice([draw.randint(1, 7), [draw.randint(1, 7), draw.randint(1, 7)]]),
        "stride": draw.randint(1, 3),
        "padding": draw.randint(0, 2),
    }
    pool = {**window, "ceil_mode": draw.choice([True, False])}
    channels = draw.choice([shape[1], draw.randint(1, 6)])
    options: dict[str, dict[str, Any]] = {
        "adaptive_avg_pool2d": {"output_size": 1},
        "adaptive_max_pool2d": {"output_size": 2},
        "avg_pool2d": pool,
        "batch_norm1d": {"num_features": channels},
        "batch_norm2d": {"num_features": channels},
        "conv2d": {"in_channels": channels, "out_channels": 2, **window, "dilation": draw.randint(1, 2)},
        "embedding": {"num_embeddings": 9, "embedding_dim": 2},
        "flatten": {"start_dim": draw.randint(-4, 4), "end_dim": draw.randint(-4, 4)},
        "group_norm": {"num_groups": 1, "num_channels": channels},
        "layer_norm": {"normalized_shape": [draw.randint(1, 6), *shape[2:]]},
        "linear": {"in_features": draw.choice([shape[-1], draw.randint(1, 6)]), "out_features": 2},
        "max_pool2d": {**pool, "dilation": draw.randint(1, 2)},
        "unflatten": {
            "dim": draw.randint(-4, 4),
            "unflattened_size": draw.choice([[1, shape[-1]], [shape[1], 1], [-1, 2], [2, 3]]),
        },
    }
    kind = draw.choice(sorted(options))
    return kind, options[kind], shape


def keeps_samples_apart(layer: torch.nn.Module, inputs: torch.Tensor) -> bool:
    """Return whether torch accepts all samples together, and each sample alone gives the same numbers."""
    try:
        together = layer(inputs)
        alone = torch.cat([layer(inputs[place : place + 1]) for place in range(BATCH)])
    except (RuntimeError, ValueError, IndexError):
        return False
    is_batch = together.shape == alone.shape and len(together) == BATCH
    return is_batch and torch.allclose(together, alone, atol=1e-5)


def test_layers_fit_where_torch_treats_each_sample_alone() -> None:
    draw, seen = random.Random(20261130), Counter[tuple[str, bool]]()
    torch.manual_seed(0)
    for _ in range(CASES):
        kind, options, shape = case(draw)
        layer = MODULES[kind](**options).eval()
        fits = misfit(layer, torch.empty(shape, device="meta"), "model.layers.0") is None
        # Pools of images without channels would work; batch_norm1d itself says what it takes; and flattening the batch
        # with one value for each sample only loses a dimension.
        is_odd = (
            ("pool2d" in kind and len(shape) == 3)
            or (kind == "batch_norm1d" and len(shape) == 4)
            or (kind == "flatten" and 1 in shape)
        )
        if not is_odd:
            assert fits == keeps_samples_apart(layer, torch.rand(shape)), (kind, options, shape)
        seen[kind, fits] += 1
    for kind in {kind for kind, _ in seen} - {"embedding"}:
        assert seen[kind, True] > 5, kind
        assert seen[kind, False] > 5, kind


@pytest.mark.parametrize(
    ("kind", "options", "shape", "hint"),
    [
        ("linear", {"in_features": 5, "out_features": 2}, [3, 7], "in_features to 7"),
        ("conv2d", {"in_channels": 5, "out_channels": 2, "kernel_size": 1}, [3, 4, 8, 8], "in_channels to 4"),
        ("group_norm", {"num_groups": 1, "num_channels": 5}, [3, 4, 8], "num_channels to 4"),
        ("layer_norm", {"normalized_shape": [5]}, [3, 4, 8], "normalized_shape to [8]"),
        ("dropout2d", {}, [3, 4, 8], "put an unflatten layer"),
        ("flatten", {"start_dim": 0}, [3, 4, 8], "start_dim to 1"),
        ("linear", {"in_features": 5, "out_features": 2}, [3, 4, 8, 8], "put a flatten layer"),
    ],
)
def test_hints_name_the_option(kind: str, options: dict[str, Any], shape: list[int], hint: str) -> None:
    found = misfit(MODULES[kind](**options), torch.empty(shape, device="meta"), "model.layers.4")
    assert found is not None
    assert hint in found.hint


def test_what_torch_says_is_one_short_line() -> None:
    module = nn.Linear(2, 2)
    for said, shown in (("wrong\nframe #0", "wrong ("), ("", "RuntimeError ("), ("x" * 9_999, "xxx... (")):
        chain = Chain({0: PlacedLayer("model.layers.0", LayerSpec(type="relu"))})
        chain["0"] = module
        module.forward = Mock(side_effect=RuntimeError(said))  # type: ignore[method-assign]
        with pytest.raises(UserError) as refused:
            chain(torch.rand(1, 2))
        assert f"{shown}model.layers.0)" in refused.value.message
        assert len(refused.value.message) < 300
