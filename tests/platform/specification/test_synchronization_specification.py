"""Specifications of synchronization: accepted values, and helpful errors for the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from share_compute.files.field_errors import invalid
from share_compute.specification.synchronization import (
    GRAPHS,
    POLICIES,
    PRESETS,
    AllReduceSpec,
    ElasticSpec,
    GossipSpec,
    LocalSpec,
    OuterNesterovSpec,
    OuterSgdSpec,
    ParameterServerSpec,
    SynchronizationSpec,
)

SPEC: TypeAdapter[SynchronizationSpec] = TypeAdapter(SynchronizationSpec)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"kind": "allreduce"}, AllReduceSpec),
        ({"kind": "local", "branches": 4, "every": 30}, LocalSpec),
        ({"kind": "local", "branches": 4, "outer": {"name": "adam", "betas": [0.9, 0.99]}}, LocalSpec),
        ({"kind": "local", "branches": 4, "preset": "diloco", "quorum": 3, "late": "drop"}, LocalSpec),
        ({"kind": "elastic", "branches": 10, "rate": 0.1, "every": 10}, ElasticSpec),
        ({"kind": "elastic", "branches": 3, "rate": 1 / 3}, ElasticSpec),
        ({"kind": "gossip", "branches": 8, "graph": "random_pairs"}, GossipSpec),
        ({"kind": "parameter_server", "branches": 4, "every": 2, "staleness": 4}, ParameterServerSpec),
        ({"kind": "parameter_server", "branches": 4, "staleness": "unbounded"}, ParameterServerSpec),
    ],
)
def test_every_policy_is_chosen_by_its_kind(options: dict[str, Any], kind: type) -> None:
    spec = SPEC.validate_python(options)
    assert isinstance(spec, kind)
    assert SPEC.validate_json(SPEC.dump_json(spec)) == spec


def test_all_kinds_are_listed() -> None:
    assert set(SPEC.json_schema()["discriminator"]["mapping"]) == set(POLICIES)
    schema = SPEC.json_schema()
    for part in schema["$defs"].values():
        assert part["additionalProperties"] is False
        assert all(field.get("description") for field in part["properties"].values())
    assert set(schema["$defs"]["GossipSpec"]["properties"]["graph"]["enum"]) == set(GRAPHS)
    json.dumps(schema)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "locl"}, "unknown synchronization 'locl'; did you mean 'local'?"),
        ({"kind": "ddp"}, "known: allreduce, auto, local"),
        ({}, "kind"),
        ("local", "mapping"),
        ({"kind": "allreduce", "every": 3}, "unknown key 'every'"),
        ({"kind": "local"}, "branches: is missing"),
        ({"kind": "local", "branches": 0}, "branches: must be at least 1"),
        (
            {"kind": "local", "branches": 2, "every": 0},
            "every: must be at least 1",
        ),
        ({"kind": "local", "branches": 2, "evry": 5}, "unknown key 'evry'; did you mean 'every'?"),
        ({"kind": "local", "branches": 2, "quorum": 3}, "quorum 3 is more than the 2 branches"),
        ({"kind": "local", "branches": 2, "quorum": 0}, "quorum"),
        ({"kind": "local", "branches": 2, "grace_s": -1}, "grace_s"),
        ({"kind": "local", "branches": 2, "grace_s": float("nan")}, "grace_s"),
        ({"kind": "local", "branches": 2, "every": 4, "overlap": 4}, "overlap 4 must be less than every 4"),
        ({"kind": "local", "branches": 2, "fragments": 3, "quorum": 1}, "fragments needs late: drop"),
        ({"kind": "local", "branches": 2, "late": "wait"}, "late: must be 'merge' or 'drop'"),
        ({"kind": "local", "branches": 2, "preset": "dilico"}, "preset"),
        ({"kind": "local", "branches": 2, "inner_state": "drop"}, "inner_state"),
        (
            {"kind": "local", "branches": 2, "outer": {"name": "nestrov"}},
            "unknown outer optimizer 'nestrov'; did you mean 'nesterov'?",
        ),
        (
            {"kind": "local", "branches": 2, "outer": {"name": "sgd", "momentum": 0.9}},
            "unknown key 'momentum'",
        ),
        (
            {"kind": "local", "branches": 2, "outer": {"name": "adam", "betas": [0.9, 1.0]}},
            "each beta must be at least 0 and less than 1",
        ),
        (
            {"kind": "elastic", "branches": 11, "rate": 0.1},
            (
                "rate 0.1 times 11 branches is 1.1, more than 1: the centre would not settle; "
                "the highest rate is 0.0909091"
            ),
        ),
        ({"kind": "gossip", "branches": 1}, "branches: must be at least 2"),
        ({"kind": "gossip", "branches": 4, "graph": "star"}, "graph: must be"),
        ({"kind": "parameter_server", "branches": 4, "staleness": -1}, "staleness"),
        ({"kind": "parameter_server", "branches": 4, "staleness": "none"}, "staleness"),
        (
            {"kind": "parameter_server", "branches": 4, "staleness": 2, "quorum": 3},
            "quorum 3 needs staleness 0: with staleness 2, each push is merged alone",
        ),
        (
            {"kind": "parameter_server", "branches": 4, "staleness": "unbounded", "quorum": 3},
            "quorum 3 needs staleness 0",
        ),
        ({"kind": "parameter_server", "branches": 4, "quorum": 5}, "quorum 5 is more than the 4 branches"),
        ({"kind": "elastic", "branches": 4, "servers": 2}, "unknown key 'servers'"),
    ],
)
def test_the_field_is_named(options: Any, message: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        SPEC.validate_python(options)
    assert message in invalid(refusal.value, "fix these fields of the job").message


def test_a_preset_fills_what_is_not_given() -> None:
    diloco = LocalSpec.model_validate({"branches": 8, "preset": "diloco"})
    assert (diloco.every, diloco.outer, diloco.inner_state) == (500, OuterNesterovSpec(), "keep")
    sparse = LocalSpec.model_validate({"branches": 8, "preset": "sparse_loco", "every": 15})
    assert (sparse.every, sparse.outer) == (15, OuterSgdSpec(learning_rate=1.0))
    assert set(PRESETS) == {"diloco", "sparse_loco"}


def test_all_branches_are_needed_unless_a_quorum_is_given() -> None:
    for kind in (LocalSpec, ParameterServerSpec):
        assert kind(branches=5).needed == 5
        assert kind(branches=5, quorum=3).needed == 3
