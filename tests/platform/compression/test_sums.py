"""Sums of compressed runs follow from the runs alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.compression.codecs import SPECS, codec, drawn
from torch import Tensor

from share_compute.compression.sums import BucketCodec, add_runs
from share_compute.protocol.tree import Node, SummationTree

SHAPES = ((40, 33), (7,), (), (300, 2))
SIZE = 40 * 33 + 7 + 1 + 600
NAMES = [name for name in SPECS if name != "powersgd"]


def bucket_codec(name: str) -> BucketCodec:
    return BucketCodec(codec(name), SHAPES)


def decoded(one: BucketCodec, bucket: Tensor) -> Tensor:
    out = torch.full((SIZE,), 7.0)
    one.decode(one.encode(bucket), out)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_of_a_bucket_is_encoded_alone(name: str) -> None:
    one, bucket = bucket_codec(name), drawn(SIZE)
    payload = one.encode(bucket)
    assert payload.shape == (one.num_bytes,)
    pieces = torch.split(decoded(one, bucket), [40 * 33, 7, 1, 600])
    own = codec(name)
    for piece, raw, shape in zip(pieces, torch.split(bucket, [40 * 33, 7, 1, 600]), SHAPES, strict=True):
        expected = own.decode(own.encode(raw.view(shape), {})[0], shape)
        assert torch.equal(piece.view(shape), expected)
    if name == "none":
        assert torch.equal(torch.cat(pieces), bucket)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_arrives_as_nan(name: str, value: float) -> None:
    bucket = drawn(SIZE)
    bucket[-1] = value
    assert decoded(bucket_codec(name), bucket).isnan().all()


def test_what_no_encoder_wrote_arrives_as_nan() -> None:
    one = bucket_codec("int8")
    payload, out = one.encode(drawn(SIZE)), torch.zeros(SIZE)
    payload[1:] = 255
    one.decode(payload, out)
    assert out.isnan().all()
    for wrong in (payload[:-1], payload.float()):
        with pytest.raises(ValueError, match="bytes"):
            one.decode(wrong, out)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.sampled_from(NAMES), st.integers(0, 99))
def test_decoded_runs_are_added_in_the_order_of_the_tree(runs: list[int], name: str, seed: int) -> None:
    tree, one = SummationTree(tuple(runs), keeps_runs_apart=True), bucket_codec(name)
    sums = {node: drawn(SIZE, seed=seed + place) for place, node in enumerate(tree.sums_of_runs)}

    def expected(node: Node) -> Tensor:
        if node in sums:
            return decoded(one, sums[node])
        children = tree.children(node)
        assert children is not None
        return expected(children[0]) + expected(children[1])

    out = torch.full((SIZE,), torch.nan)
    add_runs(tree, [one.encode(each) for each in sums.values()], one, out)
    assert torch.equal(out, expected(tree.root))
