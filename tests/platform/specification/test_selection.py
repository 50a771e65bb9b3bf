"""The machines that jobs and deployments may use: ``parallelism.only`` and ``parallelism.avoid``."""

from __future__ import annotations

from typing import Any

import pytest

from share_compute.errors import UserError
from share_compute.specification import TrainJob, parse_any_job, parse_deployment, parse_job
from share_compute.specification.placement.selection import SelectionSpec
from share_compute.topology import Contributor, Device

JOB = {"model": {"layers": [{"type": "relu"}]}, "data": {"dataset": "digits"}}
SPARSE = {"kind": "sparse", "model": {"name": "logistic"}, "data": {"files": ["/rows.libsvm"]}}
BATCH = {"kind": "embed", "data": {"files": ["/rows.jsonl"]}}
MACHINES = tuple(
    Contributor(f"con-{name}", name, (), labels=labels)
    for name, labels in (
        ("ada", {"site": "paris", "gpu": "yes"}),
        ("bob", {"site": "paris", "gpu": "no"}),
        ("eve", {}),
    )
)


@pytest.mark.parametrize(
    ("given", "allowed", "words"),
    [
        ({}, "ada bob eve", ""),
        ({"only": ["site=paris"]}, "ada bob", "a machine with site=paris"),
        ({"avoid": ["gpu=no"]}, "ada eve", "a machine without gpu=no"),
        ({"only": ["eve", "gpu=yes"]}, "ada eve", "eve or a machine with gpu=yes"),
        ({"only": ["con-bob"]}, "bob", "con-bob"),
        ({"only": ["site=paris"], "avoid": ["ada"]}, "bob", "a machine with site=paris other than ada"),
        ({"avoid": ["ada", "gpu=no"]}, "eve", "a machine without gpu=no and other than ada"),
        ({"only": ["site=rome", "site=oslo"]}, "", "a machine with site=rome or site=oslo"),
        ({"only": ["ada"], "avoid": ["gpu=yes"]}, "", "ada without gpu=yes"),
        ({"only": [*"uvwxyz"]}, "", "u or v or w or x or one of 2 more"),
    ],
)
def test_machines_are_selected(given: dict[str, Any], allowed: str, words: str) -> None:
    selection = SelectionSpec.model_validate(given)
    assert [machine.name for machine in MACHINES if selection.allows(machine)] == allowed.split()
    assert selection.words == words
    for machine in MACHINES:
        why = selection.why_not(machine)
        assert (why is None) is selection.allows(machine)
        assert why is None or why.startswith("avoided by the job: parallelism.")


def test_jobs_and_deployments_share_the_fields() -> None:
    fields = {"only": ["site=paris"], "avoid": ["ada"]}
    job = parse_job({**JOB, "parallelism": fields})
    deployment = parse_deployment({"name": "x", "model": {"path": "/x"}, "parallelism": fields})
    sparse = parse_any_job({**SPARSE, "parallelism": fields})
    batch = parse_any_job({**BATCH, "model": {"path": "/x"}, "parallelism": fields})
    for spec in (job, deployment, sparse, batch):
        assert spec.parallelism.only == ("site=paris",)  # type: ignore[union-attr]
        assert spec.parallelism.avoid == ("ada",)  # type: ignore[union-attr]
        assert type(spec).model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize("field", ["only", "avoid"])
def test_a_batch_does_not_choose_the_machines_of_a_deployment(field: str) -> None:
    with pytest.raises(UserError, match=rf"parallelism\.{field}: the deployment has machines of its own"):
        parse_any_job({**BATCH, "deployment": "poet", "parallelism": {field: ["ada"]}})
    parse_any_job({**BATCH, "deployment": "poet", "parallelism": {field: []}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"only": ["ada"], "avoid": ["bob", "ada"]}, "only and avoid both name 'ada'"),
        ({"only": ["site=paris"], "avoid": ["site=paris"]}, "only and avoid both name 'site=paris'"),
        ({"only": ["ada", "ada"]}, "'ada' is given twice"),
        ({"only": [""]}, "parallelism.only.0"),
        ({"avoid": ["GPU=no"]}, "'GPU' is no key of a label"),
        ({"avoid": ["gpu="]}, "the value of label gpu must have 1 to 64 printable characters"),
        ({"avoid": ["a\x1bb"]}, "printable characters only"),
        ({"only": [f"m{number}" for number in range(101)]}, "parallelism.only"),
        ({"only": "ada"}, "parallelism.only"),
        ({"onyl": ["ada"]}, "did you mean 'only'?"),
    ],
)
def test_wrong_selectors_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_job({**JOB, "parallelism": given})
    assert message in caught.value.message


def test_a_pinned_plan_with_a_machine_that_is_avoided_is_refused() -> None:
    plan = {
        "kind": "plan",
        "version": 1,
        "model": {"layers": 1, "digest": "0" * 32},
        "microbatches": 1,
        "stages": [{"first_layer": 0, "last_layer": 0, "machines": [{"name": "ada", "microbatches": 1}]}],
    }
    with pytest.raises(UserError, match="avoid names ada, which the pinned plan uses"):
        parse_job({**JOB, "parallelism": {"plan": plan, "avoid": ["ada"]}})


def test_a_machine_that_is_named_in_both_ways_is_found() -> None:
    selection = SelectionSpec(only=("ada", "site=paris"), avoid=("con-ada",))
    assert selection.disagreement(MACHINES) == "ada"
    assert SelectionSpec(only=("site=paris",), avoid=("con-ada",)).disagreement(MACHINES) is None


def test_each_rank_needs_a_cpu_thread() -> None:
    spec = parse_job({**JOB, "parallelism": {"tensor": 4, "only": ["ada"]}})
    machines = [
        Contributor("con-ada", "ada", (Device("cpu", "cpu", 1),), cpu_threads=4),
        Contributor("con-ada", "ada", (Device("cpu", "cpu", 1),), cpu_threads=3),
        Contributor("con-ada", "ada", (Device("cuda", "gpu", 1),), cpu_threads=8),
    ]
    assert isinstance(spec, TrainJob)
    assert [spec.parallelism.why_not(machine) for machine in machines] == [
        None,
        "too small: it can run 3 of the 4 ranks of parallelism.tensor",
        "too small: it can run 1 of the 4 ranks of parallelism.tensor",
    ]
    assert spec.parallelism.words == "ada that computes with 4 CPU threads or more, or with 4 GPUs together"


def test_devices_that_are_lent_together_have_one_rank_each() -> None:
    cpus, gpus = (Device("cpu", "cpu", 1),) * 2, (Device("cuda", "gpu", 1),) * 2
    machines = [
        Contributor("con-ada", "ada", cpus, cpu_threads=8),
        Contributor("con-bob", "bob", gpus, cpu_threads=8),
    ]
    job = parse_job({**JOB, "parallelism": {"tensor": 2}})
    deployment = parse_deployment({"name": "x", "model": {"path": "/x"}, "parallelism": {"tensor": 2}})
    larger = parse_deployment({"name": "x", "model": {"path": "/x"}, "parallelism": {"tensor": 4}})
    assert [job.parallelism.why_not(machine) for machine in machines] == [None, None]
    assert [deployment.parallelism.why_not(machine) for machine in machines] == [None, None]
    assert [larger.parallelism.why_not(machine) for machine in machines] == [
        "too small: it can run 2 of the 4 ranks of parallelism.tensor"
    ] * 2
    assert deployment.parallelism.words.endswith("2 CPU threads or more, or with 2 GPUs together")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"parallelism": {"tensor": 0}}, "tensor"),
        ({"parallelism": {"tensor": 4, "threads": 2}}, "tensor 4 needs as many threads, and threads is 2"),
        (
            {"parallelism": {"operators": {"strategies": {"mlp.*": "row"}}}},
            "operators are divided between several processes only: set tensor to 2 or more",
        ),
        (
            {"parallelism": {"tensor": 2, "operators": {"strategies": {"mlp.*": "rows"}}}},
            "parallelism.operators.strategies.mlp.*",
        ),
        (
            {"parallelism": {"tensor": 2, "operators": {"strategies": {"linear*": "row"}}}},
            "parallelism.operators.strategies names operators in the layers of a Hugging Face model",
        ),
    ],
)
def test_ranks_that_cannot_compute_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_job({**JOB, **fields})
    assert problem in str(refused.value)
