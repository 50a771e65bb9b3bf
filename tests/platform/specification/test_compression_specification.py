"""Specifications of codecs: accepted values, and helpful errors for the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from share_compute.files.field_errors import invalid
from share_compute.specification.compression import (
    CODECS,
    SPARSE_LOCO,
    CompressionSpec,
    NoCompressionSpec,
    PowerSgdSpec,
    QuantizationSpec,
    TopKSpec,
)

SPEC: TypeAdapter[CompressionSpec] = TypeAdapter(CompressionSpec)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"name": "none"}, NoCompressionSpec),
        ({"name": "bf16"}, QuantizationSpec),
        ({"name": "int8", "error_feedback": None}, QuantizationSpec),
        ({"name": "int4", "from_step": 100}, QuantizationSpec),
        ({"name": "int2"}, QuantizationSpec),
        ({"name": "sign", "error_feedback": 0.9}, QuantizationSpec),
        ({"name": "topk", "density": 0.01, "chunk": 4096, "values": "int2"}, TopKSpec),
        ({"name": "powersgd", "rank": 8}, PowerSgdSpec),
    ],
)
def test_every_codec_is_chosen_by_its_name(options: dict[str, Any], kind: type) -> None:
    spec = SPEC.validate_python(options)
    assert isinstance(spec, kind)
    assert SPEC.validate_json(SPEC.dump_json(spec)) == spec


def test_all_names_are_listed() -> None:
    schema = SPEC.json_schema()
    assert set(schema["discriminator"]["mapping"]) == set(CODECS)
    for part in schema["$defs"].values():
        assert part["additionalProperties"] is False
        assert all(field.get("description") for field in part["properties"].values())
    json.dumps(schema)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "topkk"}, "unknown codec 'topkk'; did you mean 'topk'?"),
        ({"name": "zip"}, "known: none, bf16, int8, int4, int2, sign, topk, powersgd"),
        ({}, "name"),
        ({"name": 8}, "name"),
        ("int8", "mapping"),
        ({"name": "none", "error_feedback": 1}, "unknown key 'error_feedback'"),
        ({"name": "int8", "rank": 4}, "unknown key 'rank'"),
        ({"name": "topk", "densty": 0.1}, "unknown key 'densty'; did you mean 'density'?"),
        ({"name": "topk", "density": 0}, "density: must be more than 0"),
        ({"name": "topk", "density": 1.5}, "density: must be at most 1"),
        ({"name": "topk", "density": 0.001, "chunk": 64}, "density 0.001 keeps no value of a chunk of 64"),
        ({"name": "topk", "density": float("nan")}, "density"),
        ({"name": "topk", "chunk": 1}, "chunk: must be at least 2"),
        ({"name": "topk", "chunk": 2**14 + 1}, "chunk: must be at most 16384"),
        (
            {"name": "topk", "values": "int3"},
            "values: must be 'float32', 'bf16', 'int8' or 'int2'",
        ),
        ({"name": "powersgd", "rank": 0}, "rank: must be at least 1"),
        ({"name": "sign", "error_feedback": 0}, "error_feedback: must be more than 0"),
        ({"name": "sign", "error_feedback": 1.1}, "error_feedback: must be at most 1"),
        ({"name": "sign", "error_feedback": float("inf")}, "error_feedback"),
        ({"name": "sign", "from_step": -1}, "from_step: must be at least 0"),
    ],
)
def test_the_field_is_named(options: Any, message: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        SPEC.validate_python(options)
    assert message in invalid(refusal.value, "fix these fields of the job").message


def test_the_preset_is_that_of_the_paper() -> None:
    assert SPARSE_LOCO.kept(4096) == 64
    assert (SPARSE_LOCO.chunk, SPARSE_LOCO.values, SPARSE_LOCO.error_feedback) == (4096, "int2", 0.95)
    assert SPEC.validate_python(SPARSE_LOCO.model_dump()) == SPARSE_LOCO
