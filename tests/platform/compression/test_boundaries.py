"""Tensors that cross a boundary between stages are rounded like those that cross a layer inside a shard."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.compression.codecs import drawn, tensors
from torch import Tensor

from share_compute.compression.boundaries import boundary_bytes, decoded, encoded, round_inside, rounded
from share_compute.errors import UserError, VerificationFailed
from share_compute.models.blueprint import Blueprint
from share_compute.models.boundary import Boundaries, Expected
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import parse_job
from share_compute.specification.boundaries import (
    NO_BOUNDARY_COMPRESSION,
    BoundaryCodec,
    fixed_boundaries,
)

CPU = torch.device("cpu")
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
LLAMA = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 50,
}  # fmt: skip
CODECS: tuple[BoundaryCodec, ...] = ("bf16", "int8")
COUNT = 4


def expected(tensor: Tensor, codec: BoundaryCodec) -> Expected:
    return Expected(tuple(tensor.shape), FLOATS, codec=codec)


def test_values_are_rounded_in_training_only() -> None:
    blueprint = Blueprint(config=LLAMA)  # type: ignore[arg-type]
    tokens = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(0))
    rounding, plain = (build_stage(blueprint, Shard("m", 0, COUNT, COUNT), CPU) for _ in range(2))
    round_inside(rounding, fixed_boundaries({1: "bf16", 2: "int8"}))
    for stage in (rounding, plain):
        stage.initialize(0)
        stage.module.eval()
    assert torch.equal(rounding.forward(tokens), plain.forward(tokens))
    for stage in (rounding, plain):
        stage.module.train()
    assert not torch.equal(rounding.forward(tokens), plain.forward(tokens))


@settings(deadline=None)
@given(tensors(), st.sampled_from(CODECS))
def test_a_tensor_arrives_rounded(tensor: Tensor, codec: BoundaryCodec) -> None:
    payload = encoded(tensor, codec)
    arrived = decoded(payload, expected(tensor, codec))
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, rounded(tensor, codec))
    if payload is not tensor:
        assert payload.nbytes == boundary_bytes(codec, tensor.numel())
        assert torch.equal(rounded(arrived, "bf16"), arrived) or codec != "bf16"


def test_int8_takes_about_a_quarter_of_the_bytes() -> None:
    assert boundary_bytes("int8", 2**20) <= 0.26 * boundary_bytes("none", 2**20)
    assert boundary_bytes("bf16", 2**20) == boundary_bytes("none", 2**20) / 2


def test_a_tensor_without_codec_is_sent_as_it_is() -> None:
    tensor = drawn(3, 4)
    assert encoded(tensor, "none") is tensor
    assert decoded(tensor, expected(tensor, "none")) is tensor


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3.4e38])
def test_a_tensor_that_the_codec_refuses_arrives_as_it_is(codec: BoundaryCodec, value: float) -> None:
    tensor = drawn(3, 300)
    tensor[1, 2] = value
    arrived = decoded(encoded(tensor, codec), expected(tensor, codec))
    assert torch.equal(arrived.nan_to_num(7.0), tensor.nan_to_num(7.0))
    assert torch.equal(rounded(tensor, codec).nan_to_num(7.0), tensor.nan_to_num(7.0))


@pytest.mark.parametrize("codec", CODECS)
def test_what_no_sender_encoded_is_refused(codec: BoundaryCodec) -> None:
    tensor = drawn(3, 300)
    wanted, payload = expected(tensor, codec), encoded(tensor, codec)
    for wrong, fault in [
        (payload[:-1], "damaged"),
        (torch.cat((payload, payload)), "damaged"),
        (payload.view(1, -1), "damaged"),
        (torch.full_like(payload, 255), "damaged"),
        (tensor, "not compressed"),
        (tensor.double(), "dtype is float64"),
        (tensor[:2], "shape is"),
        (tensor.int(), "dtype is int32"),
    ]:
        with pytest.raises(VerificationFailed, match=fault):
            decoded(wrong, wanted)
    with pytest.raises(VerificationFailed, match="dtype is uint8"):
        decoded(payload.view(1, -1), Expected(None, FLOATS))


def test_a_model_whose_boundaries_are_unknown_is_refused() -> None:
    misfits = [
        {"type": "linear", "options": {"in_features": 64, "out_features": 40}},
        {"type": "linear", "options": {"in_features": 41, "out_features": 40}},
        {"type": "linear", "options": {"in_features": 40, "out_features": 10}},
    ]
    document = {"model": {"layers": misfits}, "data": {"dataset": "digits"}, "training": {"steps": 1}}
    blueprint = Blueprint(layers=parse_job(document).model.layers or ())
    stage = build_stage(blueprint, Shard("m", 0, 2, 3), CPU)
    with pytest.raises(UserError, match=r"training\.boundary_compression"):
        Boundaries.of(
            stage, blueprint, 3, 16, gradients_are_finite=True, compression=fixed_boundaries({2: "int8"})
        )
    kept = Boundaries.of(
        stage, blueprint, 3, 16, gradients_are_finite=True, compression=NO_BOUNDARY_COMPRESSION
    )
    assert kept.gradient == Expected(None, frozenset({torch.float32}))
