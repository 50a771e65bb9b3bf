"""Specifications of deployments: their content, and errors that name the wrong field."""

from __future__ import annotations

from typing import Any

import pytest

from share_compute.errors import UserError
from share_compute.specification import (
    ServeJob,
    TrainJob,
    parse_deployment,
    parse_job,
    parse_submission,
)
from share_compute.specification.workload import ServingWorkload, serving_workload

TEXT = """
kind: serve
name: tiny-llama
model: {path: /srv/models/tiny-llama}
max_seq: 2048
objective: throughput
next_token_limit_s: 0.1
"""


def test_a_deployment_is_read_by_its_kind() -> None:
    spec = parse_submission(TEXT)
    assert isinstance(spec, ServeJob)
    assert spec == parse_deployment(TEXT) == parse_deployment(spec.model_dump(mode="json"))
    assert (str(spec.replicas), spec.dtype, spec.max_concurrent) == ("1", "float32", 16)
    assert serving_workload(spec) == ServingWorkload("throughput", 512, 128, 16, None, 0.1)
    train = {"model": {"layers": [{"type": "relu"}]}, "data": {"dataset": "digits"}}
    assert isinstance(parse_submission(train), TrainJob)
    from_job = parse_deployment({"name": "x", "model": {"job": "job-k3v7q2ma"}})
    assert (from_job.kind, from_job.model.artifact) == ("serve", "model")


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [(2, 2, 2), ("3", 3, 3), ("0..4", 0, 4), ({"min": 0, "max": 4}, 0, 4), ({"max": 4}, 1, 4)],
)
def test_replicas_are_a_number_or_a_range(given: Any, least: int, most: int) -> None:
    spec = parse_deployment({"name": "x", "model": {"path": "/x"}, "replicas": given})
    assert (spec.replicas.min, spec.replicas.max) == (least, most)
    assert parse_deployment(spec.model_dump(mode="json")) == spec
    short = parse_deployment({"name": "x", "model": {"path": "/x"}, "replicas": str(spec.replicas)})
    assert short == spec


def test_a_deployment_is_no_job() -> None:
    with pytest.raises(UserError, match="asks for a deployment") as caught:
        parse_job(TEXT)
    assert "the route of deployments" in (caught.value.hint or "")
    with pytest.raises(UserError, match="did you mean 'serve'"):
        parse_submission("kind: serv")
    with pytest.raises(UserError, match="kind"):
        parse_deployment({"kind": "train", "name": "x", "model": {"path": "/x"}})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": None}, "name"),
        ({"model": {}}, "model"),
        ({"model": {"path": "/x", "job": "job-1"}}, "model"),
        ({"replicas": 0}, "replicas: 0 replicas would never answer"),
        ({"replicas": "4..0"}, "replicas"),
        ({"replicas": {"min": 3, "max": 2}}, "replicas: max (2) must not be less than min (3)"),
        ({"replicas": {"max": 4, "idle_s": 3}}, "replicas.idle_s"),
        ({"replicas": True}, "replicas"),
        ({"max_seq": 1}, "max_seq"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"dtype": "int4"}, "dtype"),
        ({"tool_format": "xml"}, "tool_format"),
        ({"objective": "speed"}, "objective"),
        ({"first_token_limit_s": 0.5}, "first_token_limit_s"),
        ({"objective": "throughput", "first_token_limit_s": float("inf")}, "first_token_limit_s"),
        ({"parallelism": {"stages": 0}}, "parallelism.stages"),
        ({"parallelism": {"strategy": "auto"}}, "strategy"),
        ({"max_sequence": 5}, "did you mean 'max_seq'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], field: str) -> None:
    good = {"name": "x", "model": {"path": "/x"}}
    with pytest.raises(UserError) as caught:
        parse_deployment({**good, **change})
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"parallelism": {"tensor": 2}}, "compile auto needs parallelism.tensor 1, and it is 2"),
        ({"compile": "fast"}, "compile"),
    ],
)
def test_deployments_that_cannot_be_compiled_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_deployment({"name": "x", "model": {"path": "/x"}, "compile": "auto", **fields})
    assert problem in str(refused.value.details) + refused.value.message


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_compile_is_read_from_yaml(mode: str) -> None:
    """YAML 1.1 reads ``on`` and ``off`` as booleans."""
    assert parse_deployment(f"{TEXT}compile: {mode}\n").compile == mode
    job = f"training: {{steps: 1, compile: {mode}}}\nmodel: {{layers: [{{type: relu}}]}}\ndata: {{dataset: digits}}\n"
    assert parse_job(job).training.compile == mode
