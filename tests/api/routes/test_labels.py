"""Labels and comparisons of jobs, by REST and from the terminal."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.api.conftest import Plane

from share_compute.errors import NotFound, NotOwner, UserError
from share_compute.lifecycle.attempt_events import AttemptEnded, StepCommitted, Validated
from share_compute.lifecycle.states import JobState
from share_compute.scopes import Scope
from share_compute.specification import parse_job
from share_compute_api.client.client import Client
from share_compute_api.server.comparison import differences


def trained(plane: Plane, client: Client, job: dict[str, Any], loss: float) -> str:
    made = client.submit(job).id
    store = plane.store
    store.jobs.begin(made, [])
    store.jobs.move(made, JobState.running, "running", attempt=1)
    step = StepCommitted(
        step=1,
        loss=loss,
        learning_rate=0.1,
        gradient_norm=None,
        samples=4,
        tokens=4,
        seconds=1,
        tokens_per_s=4,
    )
    tested = Validated(split="test", step=1, loss=loss + 1, accuracy=0.5)
    store.progress.record(made, 1, [step, tested, AttemptEnded(outcome="succeeded", reason="done")])
    return made


@pytest.mark.slow
def test_labels_are_changed_at_any_time(
    plane: Plane, client: Client, digits: dict[str, Any], run: Any
) -> None:
    job = client.submit({**digits, "tags": ["first"], "group": "rates"})
    assert (job.tags, job.group) == (("first",), "rates")
    client.cancel(job.id)
    assert client.label(job.id, tags=["a", "b"]).group == "rates"
    assert client.label(job.id, group=None).group is None
    done = run("tag", job.id, "--add", "c", "--remove", "a", "--group", "new")
    assert done.stdout.strip() == f"{job.id}  tags: b, c  group: new"
    assert [one["id"] for one in json.loads(run("jobs", "--tag", "c", "--json").stdout)["items"]] == [job.id]
    assert client.jobs(tags=["c", "b"], group="new").jobs[0].id == job.id
    assert client.jobs(tags=["first"]).jobs == []
    assert "tags        b, c" in run("show", job.id).stdout
    run("tag", job.id, "--note", "no [b]warm-up")
    assert "note        no [b]warm-up" in run("show", job.id).stdout
    assert client.label(job.id, note="two\nlines").tags == ("b", "c")
    assert client.label(job.id, note="").note == ""
    for wrong in (
        {"note": "a\x07"},
        {"note": "x" * 2001},
        {"tags": ["a\x07"]},
        {"tags": [f"t{n}" for n in range(10_000)]},
        {"tag": ["a"]},
    ):
        with pytest.raises(UserError):
            client.label(job.id, **wrong)
    _, key = plane.store.keys.create("eve", [Scope.submit])
    with Client(plane.url, key) as eve, pytest.raises(NotOwner):
        eve.label(job.id, tags=[])


def test_jobs_are_compared(
    plane: Plane, client: Client, http: httpx.Client, digits: dict[str, Any], run: Any
) -> None:
    first = trained(plane, client, {**digits, "name": "slow", "tags": ["x"]}, 0.5)
    faster = {**digits, "training": {"steps": 3, "optimizer": {"learning_rate": 0.1}}}
    second = trained(plane, client, faster, 0.25)
    waiting = client.submit(digits).id
    page = client.jobs()
    assert [job.id for job in page.jobs] == [waiting, second, first]
    assert page.results == {
        first: {"loss": 0.5, "test_loss": 1.5, "test_accuracy": 0.5},
        second: {"loss": 0.25, "test_loss": 1.25, "test_accuracy": 0.5},
    }
    found = client.compare([first, second])
    assert [job.results for job in found.jobs] == [
        {"loss": 0.5, "test_loss": 1.5, "test_accuracy": 0.5},
        {"loss": 0.25, "test_loss": 1.25, "test_accuracy": 0.5},
    ]
    assert [(one.field, one.values) for one in found.differences] == [
        ("training.optimizer.learning_rate", [0.001, 0.1])
    ]
    shown = run("compare", first, second).stdout
    assert "test_accuracy" in shown
    assert "training.optimizer.learning_rate" in shown
    assert "The job files are equal" in run("compare", first, first).stdout
    with pytest.raises(NotFound):
        client.compare([first, "job-none"])
    assert http.get("/jobs/compare").status_code == 422
    assert http.get("/jobs/compare", params={"job": [first] * 21}).status_code == 422


def test_differences_have_the_names_of_sweeps_and_no_equal_values(digits: dict[str, Any]) -> None:
    layers = [{"type": "flatten"}, {"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    jobs = [
        {**digits, "model": {"layers": layers[1:]}},
        {**digits, "model": {"layers": layers}, "training": {"steps": 3, "lora": None}},
        {**digits, "training": {"steps": 3, "validate_every": 1, "early_stopping": {"patience": 7}}},
    ]
    records: Any = [SimpleNamespace(spec=parse_job(job)) for job in jobs]
    found = {one.field: one.values for one in differences(records)}
    assert found["model.layers.0.type"] == ["linear", "flatten", "linear"]
    assert found["model.layers.0.options.out_features"] == [10, None, 10]
    assert found["training.early_stopping.patience"] == [None, None, 7]
    assert all(len({str(value) for value in values}) > 1 for values in found.values())
    assert "model.layers" not in found
    sections = [field.partition(".")[0] for field in found]
    assert sections == sorted(sections), "fields that only one job has stand beside their neighbours"


def test_paths_of_other_users_stay_hidden_in_comparisons(
    plane: Plane, client: Client, digits: dict[str, Any], tmp_path: Any
) -> None:
    text = tmp_path / "secret.txt"
    text.write_text("roses are red " * 200)
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
    theirs = client.submit({"model": {"config": config}, "data": {"files": [str(text)]}}).id
    _, key = plane.store.keys.create("eve", [Scope.submit])
    with Client(plane.url, key) as eve:
        own = eve.submit(digits).id
        found = eve.compare([theirs, own])
        assert "secret" not in found.model_dump_json()
        assert any(one.field == "data.files" for one in found.differences)
    _, chat = plane.store.keys.create("max", [Scope.chat])
    answer = httpx.get(
        f"{plane.url}/api/v1/jobs/compare", params={"job": own}, headers={"Authorization": f"Bearer {chat}"}
    )
    assert answer.status_code == 403
