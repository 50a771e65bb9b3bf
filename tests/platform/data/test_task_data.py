"""Jobs with several tasks: their fields, the samples of each microbatch, their data and their heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from share_compute.data import StepOrder
from share_compute.data.order import evaluated_range, evaluation_starts, task_samples
from share_compute.data.several_tasks import (
    described_tasks,
    digest_of,
    notes_of,
    objectives_of,
    prepared_tasks,
)
from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint, blueprint_of
from share_compute.models.factory import build_stage, dissect
from share_compute.models.layers import require_fit
from share_compute.models.losses import training_loss
from share_compute.models.objective import Objective
from share_compute.shards import Shard
from share_compute.specification import TrainJob, parse_job, with_paths
from share_compute.specification.paths import names_file

CPU = torch.device("cpu")


def linear(inputs: int, outputs: int) -> dict[str, Any]:
    return {"type": "linear", "options": {"in_features": inputs, "out_features": outputs}}


def table(file: Path, target: str, *features: str) -> dict[str, Any]:
    return {
        "files": [str(file)],
        "table": {"target": target, "features": list(features or ("a", "b"))},
        "validation_fraction": 0.2,
    }


def document(file: Path = Path("rows.csv"), **changes: Any) -> dict[str, Any]:
    return {
        "model": {"layers": [linear(2, 8), {"type": "relu"}, {"type": "dropout", "options": {"p": 0.5}}]},
        "data": table(file, "colour"),
        "tasks": [
            {"name": "colour", "task": "tabular_classification", "layers": [linear(8, 3)]},
            {
                "name": "size",
                "task": "tabular_regression",
                "weight": 0.5,
                "data": table(file, "size"),
                "layers": [linear(8, 4), {"type": "dropout", "options": {"p": 0.5}}, linear(4, 1)],
            },
        ],
        "training": {"batch_size": 8, "microbatches": 4, "seed": 3},
        **changes,
    }


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.csv"
    random = np.random.default_rng(1)
    lines = [f"{random.random()},{random.random()},{'rgb'[row % 3]},{row}" for row in range(60)]
    file.write_text("a,b,colour,size\n" + "\n".join(lines) + "\n")
    return file


def blueprint(rows: Path) -> tuple[TrainJob, Blueprint]:
    spec = parse_job(document(rows))
    prepared = prepared_tasks(spec, rows.parent / "data")
    return spec, blueprint_of(spec, None, objectives=objectives_of(spec, prepared))


# -- fields ------------------------------------------------------------------------------------------------------------


def test_a_job_is_one_job_for_each_task() -> None:
    training = {"batch_size": 8, "microbatches": 4, "validate_every": 2}
    target = {"task": "size", "metric": "r2", "value": 0.5}
    spec = parse_job(document(training={**training, "target": target}))
    assert parse_job(spec.model_dump(mode="json")) == spec
    first, second = spec.single_tasks
    assert (first.resolved_task, second.resolved_loss) == ("tabular_classification", "mse")
    assert first.training.target is None
    assert second.training.watched == (("target.metric", "r2"),)
    assert len(second.model.layers or ()) == 6
    assert second.single_tasks == (second,)


def test_paths_of_all_tasks_are_found() -> None:
    spec = with_paths(parse_job(document()), lambda path, field: Path(f"/{field}/{path}"))
    assert spec.data.files == (Path("/data.files/rows.csv"),)
    assert spec.tasks[0].data is None
    other = spec.tasks[1].data
    assert other is not None
    assert other.files == (Path("/tasks.1.data.files/rows.csv"),)
    assert names_file("tasks.1.data.files")
    assert not names_file("tokenizer.path")


ENDS = {"batch_size": 8, "microbatches": 4, "validate_every": 2}
ONLY = document()["tasks"][0]
OTHER = document()["tasks"][1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"task": "tabular_regression"}, "give it to the first of the tasks"),
        ({"training": {"batch_size": 8}}, "microbatches is needed with 2 tasks"),
        ({"training": {"batch_size": 9, "microbatches": 3}}, "3 is not a multiple of the 2 tasks"),
        ({"training": {**ENDS, "loss": {"name": "hinge"}}}, "give each of the tasks its own loss"),
        ({"training": {**ENDS, "target": {"metric": "r2", "value": 1}}}, "give training.target.task"),
        (
            {"training": {**ENDS, "target": {"task": "siz", "metric": "r2", "value": 1}}},
            "unknown task of training.target 'siz'; did you mean 'size'",
        ),
        (
            {"training": {**ENDS, "early_stopping": {"task": "size", "metric": "f1"}}},
            r"tasks\.1 \(size\): training\.early_stopping\.metric f1 is no metric of tabular_regression",
        ),
        (
            {"training": {**ENDS, "synchronization": {"kind": "local", "branches": 2, "every": 2}}},
            "only allreduce is possible",
        ),
        (
            {
                "training": {
                    **ENDS,
                    "schedule": {"name": "reduce_on_plateau", "options": {"metric": "accuracy"}},
                }
            },
            "use validation_loss",
        ),
        ({"tasks": [ONLY, ONLY]}, r"tasks\.1\.name 'colour' is given twice"),
        ({"tasks": [{**ONLY, "data": table(Path("x.csv"), "x")}, OTHER]}, "the first task has the data"),
        ({"tasks": [{**ONLY, "layers": []}, OTHER]}, "colour needs a head"),
        (
            {
                "tasks": [
                    {**ONLY, "layers": [{"type": "batch_norm1d", "options": {"num_features": 8}}]},
                    OTHER,
                ]
            },
            "batch_norm1d cannot be in a head",
        ),
        ({"tasks": [ONLY, {**OTHER, "loss": {"name": "bce"}}]}, r"tasks\.1 \(size\): training\.loss\.name"),
        ({"tasks": [ONLY, {**OTHER, "task": None}]}, r"tasks\.1 \(size\): data\.table needs a task"),
        (
            {"tasks": [ONLY, {**OTHER, "data": {**OTHER["data"], "validation_fraction": 0}}]},
            "all of them or none keep samples",
        ),
        (
            {"tasks": [ONLY, {**OTHER, "data": {**OTHER["data"], "validation_fraction": 0.4}}]},
            r"tasks\.1\.data: another task has the same files with another validation_fraction",
        ),
        (
            {"tasks": [ONLY, {**OTHER, "data": {**OTHER["data"], "slicing": "full_batch"}}]},
            r"tasks\.1\.data\.slicing: tasks share their layers",
        ),
        (
            {
                "tasks": [
                    {**each, "layers": [{"type": "relu"}] * 5_000 + each["layers"]} for each in (ONLY, OTHER)
                ]
            },
            "more than 10000 layers",
        ),
        (
            {"model": {"config": {"model_type": "llama"}}},
            r"a Hugging Face model is shared by .*: give model\.layers",
        ),
        ({"then": {"serve": {"name": "x", "replicas": 1}}}, "cannot be served"),
        (
            {"tasks": [ONLY, {**OTHER, "task": None, "data": {"files": ["a.csv"], "labels": {}}}]},
            "tokenizer.path is needed for tasks.1",
        ),
        (
            {"tasks": [ONLY, {**OTHER, "task": None, "data": {"files": ["a.csv"], "pairs": {}}}]},
            "an embedding cannot be one of several tasks",
        ),
    ],
)
def test_tasks_that_cannot_be_learned_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse_job(document(**changes))


def test_a_metric_of_a_task_needs_tasks() -> None:
    plain = {**document(), "tasks": [], "task": "tabular_classification"}
    plain["training"] = {**ENDS, "target": {"task": "size", "metric": "f1", "value": 1}}
    with pytest.raises(UserError, match=r"target\.task 'size' is for a job with tasks"):
        parse_job(plain)


# -- samples -----------------------------------------------------------------------------------------------------------


def test_each_task_visits_all_its_samples_in_each_pass() -> None:
    orders = [StepOrder(5, 12, 3), StepOrder(5, 6, 3)]
    taken: list[list[int]] = [[], []]
    for step in range(1, 5):
        for microbatch in range(4):
            taken[microbatch % 2] += task_samples(orders, 4, step, microbatch).tolist()
    assert [sorted(taken[0][:12]), sorted(taken[0][12:])] == [list(range(12))] * 2
    assert [sorted(taken[1][start : start + 6]) for start in range(0, 24, 6)] == [list(range(6))] * 4


def test_the_samples_of_one_task_are_those_of_a_job_without_tasks() -> None:
    whole, parts = StepOrder(7, 50, 12), [StepOrder(7, 50, 3)]
    for step in (1, 2, 9):
        found = [task_samples(parts, 4, step, microbatch) for microbatch in range(4)]
        assert np.concatenate(found).tolist() == whole.indices(step).tolist()


def test_evaluations_take_each_sample_of_each_task_once() -> None:
    sizes = [7, 0, 3]
    starts = evaluation_starts(sizes, 3)
    assert starts == [0, 3, 3, 4]
    found = [evaluated_range(sizes, 3, microbatch) for microbatch in range(starts[-1])]
    assert found == [(0, range(3)), (0, range(3, 6)), (0, range(6, 7)), (2, range(3))]


def test_samples_of_other_shapes_are_refused(rows: Path, tmp_path: Path) -> None:
    tasks = [ONLY, {**OTHER, "data": table(rows, "size", "a")}]
    with pytest.raises(UserError, match=r"tasks\.1 \(size\): a sample has the shape \[1\]"):
        prepared_tasks(parse_job(document(rows, tasks=tasks)), tmp_path / "data")


def test_errors_in_the_data_name_the_task(rows: Path, tmp_path: Path) -> None:
    tasks = [ONLY, {**OTHER, "data": table(rows, "weight")}]
    with pytest.raises(UserError) as caught:
        prepared_tasks(parse_job(document(rows, tasks=tasks)), tmp_path / "data")
    assert caught.value.message.startswith("task size: ")


def test_data_of_all_tasks_is_described(rows: Path, tmp_path: Path) -> None:
    spec = parse_job(document(rows))
    prepared = prepared_tasks(spec, tmp_path / "data")
    assert digest_of(prepared) != digest_of(prepared[:1]) == prepared[0].digest
    assert all(note.startswith(("task colour: ", "task size: ")) for note in notes_of(spec, prepared))
    heads = blueprint_of(spec, None, objectives=objectives_of(spec, prepared)).heads
    first, second = described_tasks(heads, prepared)
    assert first["data"]["target"]["categories"] == ("b", "g", "r")
    assert (second["name"], second["loss"], second["weight"]) == ("size", "mse", 0.5)
    assert second["layers"][0] == linear(8, 4)


# -- heads -------------------------------------------------------------------------------------------------------------


def test_heads_are_the_last_layer(rows: Path) -> None:
    _, model = blueprint(rows)
    profile = dissect(model)
    assert profile.counted
    assert [layer.parameters for layer in profile.layers] == [24, 0, 0, 27 + 36 + 5]
    require_fit(model)
    last = build_stage(model, Shard("m", 3, 4, 4), CPU)
    assert set(last.parameters()) == {
        f"layers.3.head_{name}.{kind}"
        for name in ("colour.0", "size.0", "size.2")
        for kind in ("weight", "bias")
    }


def test_a_head_that_does_not_fit_its_task_is_refused(rows: Path) -> None:
    other = {**OTHER, "data": table(rows, "size")}
    tasks = [{**ONLY, "layers": [linear(8, 4)]}, other]
    spec = parse_job(document(rows, tasks=tasks))
    objectives = objectives_of(spec, prepared_tasks(spec, rows.parent / "data"))
    with pytest.raises(UserError, match="last layer"):
        require_fit(blueprint_of(spec, None, objectives=objectives))
    tasks = [ONLY, {**other, "layers": [linear(7, 1)]}]
    spec = parse_job(document(rows, tasks=tasks))
    with pytest.raises(UserError, match=r"layer 3\.head_size\.0 does not fit .*\(tasks\.1\.layers\.0\)"):
        require_fit(blueprint_of(spec, None, objectives=objectives))


def test_the_backward_pass_recomputes_the_head_of_its_own_microbatch(rows: Path) -> None:
    """Two microbatches of different tasks are in flight: activation checkpointing must not mix their heads."""
    _, model = blueprint(rows)
    gradients = []
    for checkpointing in (False, True):
        stage = build_stage(
            model.model_copy(update={"activation_checkpointing": checkpointing}), Shard("m", 0, 4, 4), CPU
        )
        stage.initialize(1)
        stage.module.train()
        inputs, outputs = torch.arange(8.0).reshape(4, 2), []
        for microbatch in range(2):
            stage.prepare_cell(1, 1, microbatch)
            outputs.append(stage.forward(inputs))
        targets = [torch.tensor([0, 1, 2, 0]), torch.ones(4)]
        for microbatch in range(2):
            loss, count = training_loss(
                outputs[microbatch], targets[microbatch], stage.objective_of(microbatch)
            )
            (loss / count).backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in stage.parameters().values()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_the_loss_of_a_task_is_multiplied_by_its_weight() -> None:
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0])
    objective = Objective(task="tabular_regression", loss="mse", weight=0.5)
    loss, count = training_loss(outputs, targets, objective)
    assert (float(loss), count) == (5.0, 2)
