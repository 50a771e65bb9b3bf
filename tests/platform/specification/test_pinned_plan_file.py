"""Plan files: their content, and the error for each kind of wrong content."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from share_compute.errors import UserError
from share_compute.files.plain_yaml import MOST_BYTES, write_yaml
from share_compute.specification import parse_job
from share_compute.specification.placement.pinned_plan import PinnedPlan, read_plan, write_plan
from share_compute_api.client.job_file import read_any_job, read_job, read_submission

PLAN: dict[str, Any] = {
    "kind": "plan",
    "version": 1,
    "model": {"layers": 4, "parameters": 100, "digest": "0123456789abcdef" * 2},
    "microbatches": 4,
    "stages": [
        {
            "first_layer": 0,
            "last_layer": 1,
            "machines": [{"name": "a", "microbatches": 4, "memory_bytes": 7}],
        },
        {
            "first_layer": 2,
            "last_layer": 3,
            "machines": [{"name": "b", "microbatches": 3}, {"name": "c", "microbatches": 1}],
        },
    ],
}
JOB: dict[str, Any] = {
    "model": {
        "layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 64}} for _ in range(4)]
    },
    "data": {"dataset": "digits"},
    "training": {"batch_size": 16},
}


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    """Return the plan with another value in one place."""
    plan: Any = deepcopy(PLAN)
    inner = plan
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return dict(plan)


def test_a_written_plan_is_read_again() -> None:
    plan = PinnedPlan.model_validate(PLAN)
    assert PinnedPlan.model_validate(read_plan(write_plan(plan))) == plan
    assert plan.names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (changed("kind", value="topology"), "of kind 'topology', not of kind 'plan'"),
        (changed("version", value=2), "version '2'; this release reads version 1"),
        (changed("version", value=True), "version 'True'"),
        (["a"], "no mapping of keys"),
        (changed("stages", 1, "first_layer", value=1), "stages.0 and stages.1 overlap"),
        (changed("stages", 1, "first_layer", value=3), "no stage has layer 2"),
        (changed("stages", 0, "first_layer", value=1), "stages.0 begins with layer 1"),
        (changed("stages", 1, "last_layer", value=2), "ends with layer 2, and the last of model.layers 4"),
        (changed("stages", 0, "last_layer", value=-1), "stages.0.last_layer"),
        (changed("stages", 1, "last_layer", value=1), "before its first layer 2"),
        (changed("stages", value=[]), "stages"),
        (changed("stages", 0, "machines", value=[]), "stages.0.machines"),
        (changed("stages", 0, "machines", 0, "microbatches", value=3), "stages.0 have 3 microbatches together"),
        (changed("stages", 1, "machines", 1, "name", value="a"), "machine 'a' is given twice"),
        (changed("stages", 0, "machines", 0, "name", value="\x1b[2J"), "control characters"),
        (changed("stages", 0, "machines", 0, "name", value="n" * 201), "stages.0.machines.0.name"),
        (changed("stages", 0, "machines", 0, "nmae", value="a"), "did you mean 'name'"),
        (changed("stage", value=[]), "did you mean 'stages'"),
        (changed("microbatches", value=10**9), "microbatches"),
        (changed("model", "digest", value="x"), "model.digest"),
        (changed("model", "layers", value=10**9), "model.layers"),
        (changed("stages", value=[deepcopy(PLAN["stages"][0]) for _ in range(2000)]), "stages"),
    ],
)  # fmt: skip
def test_wrong_content_is_refused(plan: Any, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        read_plan(yaml.safe_dump(plan))
    assert problem in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("parallelism", {"stages": 2}, "leave out stages or plan"),
        ("parallelism", {"members_per_stage": 1}, "leave out members_per_stage or plan"),
        ("parallelism", {"plan": "plan.yaml"}, "only the command line reads"),
        ("parallelism", {"plan": {"kind": "plan"}}, "parallelism.plan.version"),
        ("training", {"microbatches": 8}, "has 4 microbatches, and training.microbatches is 8"),
        ("training", {"batch_size": 6}, "batch_size 6 is not a multiple of the 4 microbatches"),
        (
            "training",
            {"synchronization": {"kind": "local", "branches": 2}},
            "each branch has a plan of its own",
        ),
        (
            "training",
            {"synchronization": {"kind": "auto", "branches": 2}},
            "each branch has a plan of its own",
        ),
    ],
)
def test_a_job_and_its_pinned_plan_must_fit(field: str, value: dict[str, Any], problem: str) -> None:
    document = {**JOB, "parallelism": {"plan": PLAN}}
    document[field] = {**document[field], **value}
    with pytest.raises(UserError) as caught:
        parse_job(document)
    assert problem in caught.value.message


def test_a_pinned_plan_decides_the_number_of_machines() -> None:
    job = parse_job({**JOB, "parallelism": {"plan": PLAN}})
    assert job.parallelism.machines_needed == 3
    assert job.without_pinned_plan().parallelism.machines_needed == 1
    assert parse_job(JOB).without_pinned_plan() == parse_job(JOB)


class TestJobFiles:
    def write(self, folder: Path, plan: str, named: str = "plan.yaml") -> Path:
        (folder / "plan.yaml").write_text(plan)
        file = folder / "job.yaml"
        file.write_text(write_yaml({**JOB, "parallelism": {"plan": named}}))
        return file

    def test_the_content_replaces_the_name(self, tmp_path: Path) -> None:
        file = self.write(tmp_path, write_yaml(PLAN))
        for read in (read_job, read_any_job, read_submission):
            job: Any = read(file)
            assert job.parallelism.plan == PinnedPlan.model_validate(PLAN)

    def test_the_job_of_a_sweep_may_pin_a_plan(self, tmp_path: Path) -> None:
        (tmp_path / "plan.yaml").write_text(write_yaml(PLAN))
        job = {**JOB, "parallelism": {"plan": "plan.yaml"}}
        fields = {"training.optimizer.learning_rate": {"kind": "choice", "values": [0.1, 0.2]}}
        sweep = {"kind": "sweep", "job": job, "fields": fields, "trials": 2}
        (tmp_path / "sweep.yaml").write_text(write_yaml(sweep))
        try:
            found: Any = read_any_job(tmp_path / "sweep.yaml")
        except UserError as failure:
            assert "plan" not in failure.message  # noqa: PT017 - fields of sweeps are tested elsewhere
        else:
            assert found.job.parallelism.plan.names == ("a", "b", "c")

    @pytest.mark.parametrize(
        ("plan", "problem"),
        [
            pytest.param("# " + "x" * 10 * 2**20, "is longer than 256 KiB", id="10 MiB"),
            ("a: [", "not valid YAML"),
            ("kind: plan\nversion: 1\n", "model"),
            ("kind: &a plan\nversion: *a\n", "aliases"),
            ("", "no mapping of keys"),
        ],
    )
    def test_a_file_that_is_no_plan_is_named(self, tmp_path: Path, plan: str, problem: str) -> None:
        file = self.write(tmp_path, plan)
        with pytest.raises(UserError) as caught:
            read_job(file)
        assert str(tmp_path / "plan.yaml") in caught.value.message
        assert problem in caught.value.message
        assert MOST_BYTES == 256 << 10

    @pytest.mark.parametrize("named", ["other.yaml", ".", "~no-such-user/plan.yaml", "a\0b"])
    def test_a_missing_file_is_named(self, tmp_path: Path, named: str) -> None:
        with pytest.raises(UserError, match=r"parallelism\.plan"):
            read_job(self.write(tmp_path, write_yaml(PLAN), named))
