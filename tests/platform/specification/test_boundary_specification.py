"""Specifications of compression between stages: accepted values, and helpful errors for the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.errors import UserError
from share_compute.specification import parse_job
from share_compute.specification.boundaries import (
    BOUNDARY_CODECS,
    FixedBoundaryCompressionSpec,
    fixed_boundaries,
)


def document(boundaries: Any) -> dict[str, Any]:
    return {
        "model": {"config": {"model_type": "llama"}},
        "data": {"files": ["a.txt"]},
        "training": {"boundary_compression": boundaries},
    }


@pytest.mark.parametrize(
    ("boundaries", "codecs"),
    [
        ({"name": "none"}, ["none", "none", "none"]),
        ({"name": "bf16"}, ["bf16", "bf16", "bf16"]),
        ({"name": "int8"}, ["int8", "int8", "int8"]),
        ({"name": "auto"}, ["none", "none", "none"]),
        ({"name": "fixed", "bf16": [2], "int8": [3]}, ["none", "bf16", "int8"]),
        ({"name": "fixed"}, ["none", "none", "none"]),
    ],
)
def test_a_codec_is_chosen_for_each_layer(boundaries: dict[str, Any], codecs: list[str]) -> None:
    job = parse_job(document(boundaries))
    found = job.training.boundary_compression
    assert [found.codec(layer) for layer in (1, 2, 3)] == codecs
    assert parse_job(json.loads(job.model_dump_json())) == job
    assert hash(found) == hash(parse_job(document(boundaries)).training.boundary_compression)


def test_nothing_is_compressed_by_default() -> None:
    job = parse_job({"model": {"config": {"model_type": "llama"}}, "data": {"files": ["a.txt"]}})
    assert job.training.boundary_compression.name == "none"


@pytest.mark.parametrize(
    ("boundaries", "field", "message"),
    [
        ({"name": "int4"}, "", "unknown boundary compression 'int4'; did you mean 'int8'?"),
        ({"name": "topk"}, "", "known: none, bf16, int8, auto, fixed"),
        ({"name": "int8", "int8": [3]}, ".int8", "unknown key 'int8'; known keys: name"),
        ({"name": "fixed", "int8": [0]}, ".int8.0", "at least 1"),
        ({"name": "fixed", "bf16": [2**31]}, ".bf16.0", "at most"),
        ({"name": "fixed", "bf16": ["x"]}, ".bf16.0", "whole number"),
        ({"name": "fixed", "bf16": list(range(1, 5000))}, ".bf16", "4096"),
        ({"name": "fixed", "bf16": [2], "int8": [4, 2]}, "", "bf16 and int8 name layer 2 more than once"),
        ({"name": "fixed", "int8": [4, 4]}, "", "name layer 4 more than once"),
        ("int8", "", "mapping"),
        ({}, "", "name"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(boundaries: Any, field: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_job(document(boundaries))
    assert message in caught.value.message
    assert f"training.boundary_compression{field}" in caught.value.message


@given(st.dictionaries(st.integers(1, 100), st.sampled_from(BOUNDARY_CODECS)))
def test_codecs_of_layers_are_kept(codecs: dict[int, Any]) -> None:
    found = fixed_boundaries(codecs)
    assert {layer: found.codec(layer) for layer in codecs} == codecs
    assert found.layers == tuple(sorted(layer for layer, codec in codecs.items() if codec != "none"))
    assert FixedBoundaryCompressionSpec.model_validate(found.model_dump(mode="json")).codec(101) == "none"
