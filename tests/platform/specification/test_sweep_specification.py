"""The specification of sweeps, and the trials that are drawn from it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.platform.specification.test_specification import defaults, schema_fields

from share_compute.errors import UserError
from share_compute.specification import (
    SweepJob,
    job_schema,
    parse_any_job,
    settings_of,
    trial_job,
    with_paths,
)
from share_compute.specification.kinds.sweep import FILES
from share_compute.specification.paths import DATA_FIELDS

ROOT = Path(__file__).parents[3]
RATE = "training.optimizer.learning_rate"
JOB = {
    "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
    "data": {"dataset": "digits"},
    "training": {"steps": 100, "validate_every": 10},
}


def sweep(fields: dict[str, Any], **changes: Any) -> SweepJob:
    spec = parse_any_job({"kind": "sweep", "name": "rates", "job": JOB, "fields": fields, **changes})
    assert isinstance(spec, SweepJob)
    return spec


def test_a_grid_has_all_combinations_and_the_last_field_changes_first() -> None:
    spec = sweep({RATE: {"values": [0.1, 0.01]}, "training.seed": {"integers": [3, 5]}})
    found = [tuple(settings_of(spec, number).values()) for number in range(1, spec.trials + 1)]
    assert found == [(0.1, 3), (0.1, 4), (0.1, 5), (0.01, 3), (0.01, 4), (0.01, 5)]


def test_random_trials_depend_on_seed_and_number_only() -> None:
    fields = {RATE: {"log_uniform": [1e-4, 1e-1]}, "training.seed": {"integers": [1, 8]}}
    random = {"kind": "random", "trials": 200, "seed": 7}
    spec = sweep(fields, search=random)
    found = [settings_of(spec, number) for number in range(1, 201)]
    assert [settings_of(parse_any_job(spec.model_dump(mode="json")), 5)] == found[4:5]  # type: ignore[arg-type]
    more = sweep({**fields, "training.loss.label_smoothing": {"uniform": [0, 0.2]}}, search=random)
    assert settings_of(more, 9) | found[8] == settings_of(more, 9)
    assert settings_of(sweep(fields, search={**random, "seed": 8}), 1) != found[0]
    rates = [one[RATE] for one in found]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    middle = sum(math.log10(rate) for rate in rates) / len(rates)
    assert middle == pytest.approx(-2.5, abs=0.2)
    assert {one["training.seed"] for one in found} == set(range(1, 9))
    # The values of a trial never change between versions, so that a sweep of an older server can continue.
    assert found[0] == {RATE: 0.000229, "training.seed": 2}


def test_a_trial_is_the_job_with_other_values() -> None:
    spec = sweep(
        {
            RATE: {"values": [0.1]},
            "model.layers.0.options.bias": {"values": [False]},
            "training.early_stopping.patience": {"values": [2]},
        },
        tags=["mine"],
    )
    job = trial_job(spec, 1, "job-sweep")
    assert (job.name, job.tags, job.group) == ("rates 1", ("mine",), "job-sweep")
    assert job.training.optimizer.learning_rate == 0.1
    assert job.model.layers is not None
    assert job.model.layers[0].options["bias"] is False
    assert job.training.early_stopping is not None
    assert trial_job(spec.model_copy(update={"group": "own"}), 1, "job-sweep").group == "own"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"training.optimizer.learning_rat": {"values": [1]}}, "did you mean 'learning_rate'"),
        ({"trainin.steps": {"values": [1]}}, "did you mean 'training'"),
        ({"training.steps.most": {"values": [1]}}, "training.steps has no parts"),
        ({"model.layers.3.options.bias": {"values": [True]}}, "has no parts"),
        ({f"model.layers.{'9' * 5000}": {"values": [True]}}, "has no parts"),
        ({RATE: {"values": [0.1, -1]}}, r"trial 2 \(training.optimizer.learning_rate = -1\).*more than 0"),
        ({"data.validation_fraction": {"values": [0]}}, "metric needs samples to validate on"),
    ],
)
def test_wrong_trials_are_named(fields: dict[str, Any], problem: str) -> None:
    spec = sweep(fields)
    with pytest.raises(UserError, match=problem) as caught:
        trial_job(spec, spec.trials)
    assert caught.value.details["fields"][0]["field"] == "fields"


def test_no_field_with_a_path_can_be_searched() -> None:
    """Paths in `fields` would not be checked against the data roots, nor be hidden from other keys."""
    found: set[str] = set()
    files = {name: [f"{name}.csv"] for name in ("files", "validation_files", "test_files")}
    data = {**files, "labels": {"column": "label"}}
    spec = parse_any_job({"model": {"path": "model"}, "tokenizer": {"path": "words"}, "data": data})

    def note(path: Path, field: str) -> Path:
        found.add(field)
        return path

    with_paths(spec, note)
    assert found == {"model.path", "tokenizer.path", *DATA_FIELDS}
    assert found <= {*FILES}


def test_the_example_of_a_whole_part_is_valid() -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    whole = re.search(r"`(training\.synchronization: \{values.*?\]\})`", page, flags=re.DOTALL)
    assert whole is not None
    spec = sweep(yaml.safe_load(whole[1]))
    for number in range(1, spec.trials + 1):
        trial_job(spec, number)


def test_trials_are_compared_after_a_validation() -> None:
    spec = sweep({"training.validate_every": {"values": [10, 15]}}, early_stopping={"first": 30})
    trial_job(spec, 1)
    spec = sweep({"training.validate_every": {"values": [10, 20]}}, early_stopping={"first": 30})
    with pytest.raises(UserError, match=r"trial 2 .*not a multiple"):
        trial_job(spec, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"fields": {}}, "at least 1"),
        ({"fields": {RATE: {"values": [1], "integers": [1, 2]}}}, "exactly one of values"),
        ({"fields": {RATE: {"uniform": [2, 1]}}}, "must be below"),
        ({"fields": {RATE: {"log_uniform": [0, 1]}}}, "above 0"),
        ({"fields": {RATE: {"uniform": [0.1, 1]}}}, "grid needs lists"),
        (
            {"fields": {"training.seed": {"integers": [1, 1000]}, RATE: {"values": [1] * 100}}},
            "100,000 points",
        ),
        ({"fields": {"training.seed": {"integers": [10**400, 1]}}}, "at most"),
        ({"fields": {"model.layers": {"values": ["x" * 4095]}}}, "4,097 bytes as JSON"),
        ({"fields": {"name": {"values": ["a"]}}}, "cannot be searched"),
        ({"fields": {"model.hub": {"values": ["org/a"]}}}, "model.hub cannot be searched"),
        ({"fields": {"model": {"values": [{"revision": "main"}]}}}, "model.revision cannot be searched"),
        (
            {"fields": {"data": {"values": [{"dataset": "digits"}, {"files": ["a.txt"]}]}}},
            "data.files cannot",
        ),
        ({"fields": {"data.files.0": {"values": ["a.txt"]}}}, "data.files.0 cannot be searched"),
        ({"fields": {"parallelism": {"values": [{"plan": {}}]}}}, "parallelism.plan cannot be searched"),
        ({"fields": {"parallelism.plan.stages.0": {"values": [{}]}}}, "stages.0 cannot be searched"),
        ({"fields": {"tasks.0.data.test_files": {"values": [["a.txt"]]}}}, "cannot be searched"),
        ({"fields": {"tasks": {"values": [[{"data": {"files": ["a.txt"]}}]]}}}, "tasks.0.data.files cannot"),
        ({"fields": {"training": {"values": [{}]}, RATE: {"values": [1]}}}, "is a part of training"),
        ({"search": {"kind": "random", "trials": 10**6}}, "256"),
        ({"search": {"kind": "gird"}}, "did you mean 'grid'"),
        ({"metric": "rmse"}, "no metric of image_classification"),
        (
            {
                "metric": "accuracy",
                "job": {**JOB, "tasks": [{"name": "digit", "layers": [{"type": "relu"}]}]},
            },
            "is a metric of one task of job.tasks",
        ),
        ({"job": {**JOB, "data": {"dataset": "digits", "validation_fraction": 0}}}, "to validate on"),
        ({"early_stopping": {"first": 15}}, "not a multiple of"),
        ({"early_stopping": {"first": 100}}, "must be below the 100 steps"),
        (
            {"early_stopping": {"first": 10}, "job": {**JOB, "training": {}}},
            "needs job.training.validate_every",
        ),
        ({"job": {**JOB, "training": {"stepz": 1}}}, r"job\.training\.stepz.*did you mean 'steps'"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse_any_job({"kind": "sweep", "job": JOB, "fields": {RATE: {"values": [0.1]}}, **changes})


class TestSweepSchema:
    def fields(self) -> dict[str, dict[str, Any]]:
        schema = job_schema("sweep")
        del schema["properties"]["job"]  # its fields are those of a training job
        return dict(schema_fields(schema, schema))

    def test_every_field_is_described(self) -> None:
        plain = {name: field for name, field in self.fields().items() if "$ref" not in field}
        assert [name for name, field in plain.items() if not field.get("description")] == []

    def test_the_page_has_every_field(self) -> None:
        page = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
        section = page.partition("\n## Fields\n")[2].partition("\n## ")[0]
        rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", section, flags=re.MULTILINE))
        properties = SweepJob.model_fields
        assert {name.partition(".")[0] for name in rows} == set(properties)
        wanted = defaults(job_schema("sweep"))
        assert {name: rows[name] for name in rows if name in wanted} == {
            name: wanted[name] for name in rows if name in wanted
        }
        json.dumps(job_schema("sweep"))
