"""Checks that tensors that arrive at a shard match its blueprint."""

from __future__ import annotations

import pytest
import torch

from share_compute.models.blueprint import Blueprint
from share_compute.models.boundary import Boundaries, Expected, boundary_shape
from share_compute.models.factory import build_stage
from share_compute.models.numbers import is_finite
from share_compute.shards import Shard
from share_compute.specification import parse_job
from share_compute.specification.boundaries import NO_BOUNDARY_COMPRESSION

CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 50,
}  # fmt: skip
LAYERS = [
    {"type": "unflatten", "options": {"dim": 1, "unflattened_size": [1, 8, 8]}},
    {"type": "conv2d", "options": {"in_channels": 1, "out_channels": 4, "kernel_size": 3}},
    {"type": "flatten"},
    {"type": "linear", "options": {"in_features": 144, "out_features": 10}},
]
FLOATS = frozenset({torch.float32})


def blueprints() -> list[tuple[Blueprint, int, torch.Tensor]]:
    document = {"model": {"layers": LAYERS}, "data": {"dataset": "digits"}, "training": {"steps": 1}}
    layers = parse_job(document).model.layers
    assert layers is not None
    return [
        (Blueprint(layers=layers), len(layers), torch.randn(3, 64)),
        (Blueprint(config=LLAMA), LLAMA["num_hidden_layers"], torch.randint(50, (3, 16))),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(("blueprint", "count", "samples"), blueprints(), ids=["layers", "llama"])
def test_shapes_are_those_that_stages_make(blueprint: Blueprint, count: int, samples: torch.Tensor) -> None:
    for cut in range(2, count):  # the first of these layers trains nothing, and gets no gradient
        first = build_stage(blueprint, Shard("a", 0, cut, count), CPU)
        second = build_stage(blueprint, Shard("b", cut, count, count), CPU)
        first.initialize(0)
        made = first.forward(samples)
        assert tuple(made.shape) == boundary_shape(blueprint, cut, 3, 16)
        arriving = [
            Boundaries.of(
                stage, blueprint, 3, 16, gradients_are_finite=True, compression=NO_BOUNDARY_COMPRESSION
            )
            for stage in (first, second)
        ]
        assert arriving[0].activation is None
        assert arriving[1].gradient is None
        for expected in (arriving[0].gradient, arriving[1].activation):
            assert expected is not None
            assert expected.misfit(made) is None
            assert expected.misfit(made[:2]) is not None


def test_a_misfit_is_reported_in_plain_words() -> None:
    expected = Expected((2, 3), FLOATS)
    assert expected.misfit(torch.ones(2, 3)) is None
    assert expected.misfit(torch.ones(3, 2)) == "its shape is [3, 2] in place of [2, 3]"
    assert expected.misfit(torch.ones(2, 3).double()) == "its dtype is float64 in place of float32"
    assert expected.misfit_of_some(torch.ones(7, 3)) is None
    assert expected.misfit_of_some(torch.ones(7, 4)) is not None


def test_large_numbers_are_finite_though_their_sum_is_not() -> None:
    large = torch.full((4,), torch.finfo(torch.float32).max)
    assert is_finite(large)
    for value in (torch.nan, torch.inf, -torch.inf):
        large[2] = value
        assert not is_finite(large)
    assert not is_finite(torch.tensor([torch.inf, -torch.inf]))
    assert is_finite(torch.tensor([2**62]))
