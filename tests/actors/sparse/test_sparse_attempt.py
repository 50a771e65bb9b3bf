"""Attempts at jobs with sparse models on Ray: events, results, lost processes, and requests of the control plane."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from sklearn.datasets import dump_svmlight_file, load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from tests.planted import planted_files
from tests.ray_nodes import on_the_head, processes_on

from share_compute.lifecycle.attempt_events import AttemptEvent, SparseAssignment, attempt_events
from share_compute.sparse.keys import BIAS, places_of
from share_compute.sparse.results import load_rows
from share_compute.specification import SparseJob, parse_any_job
from share_compute.topology import Topology
from share_compute_actors.sparse.coordinator import SparseCoordinator

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
ROWS, FEATURES = 1200, 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Rows of a planted model, for training and validation; bags of words; ratings."""
    folder, draw = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    found = planted_files(folder, draw, ROWS, FEATURES)
    counts = draw.integers(1, 5, size=(40, 6))
    lines = [
        f"{row + 1} {word + 1 + 6 * (row % 2)} {counts[row, word]}" for row in range(40) for word in range(6)
    ]
    words = folder / "docword.txt"
    words.write_text("\n".join(["40", "12", str(len(lines)), *lines]) + "\n")
    pairs = [
        f"{user},{item},{1 + (user * item) % 5}"
        for user in range(20)
        for item in range(10)
        if (user + item) % 3
    ]
    ratings = folder / "ratings.csv"
    ratings.write_text("\n".join(["user,item,rating", *pairs]) + "\n")
    return {**found, "bags": str(words), "ratings": str(ratings)}


def job(model: dict[str, Any], files: dict[str, str], **training: Any) -> SparseJob:
    data: dict[str, Any] = {"files": [files["train"]], "validation_files": [files["validation"]]}
    if model["name"] == "lda":
        data = {"format": "bags", "files": [files["bags"]], "validation_files": [files["bags"]]}
    if model["name"] == "matrix_factorization":
        data = {"format": "ratings", "files": [files["ratings"]], "validation_files": [files["ratings"]]}
    spec = parse_any_job({"kind": "sparse", "model": model, "data": data, "training": training})
    assert isinstance(spec, SparseJob)
    return spec


def attempted(
    spec: SparseJob,
    topology: Topology,
    folder: Path,
    watch: Callable[[Any, list[AttemptEvent]], None] = lambda *_: None,
    checkpoint_every_s: float | None = None,
) -> list[AttemptEvent]:
    """Run an attempt; return its events."""
    assignment = SparseAssignment(
        job_id="job-test",
        attempt=1,
        spec=spec,
        topology=topology,
        folder=folder,
        checkpoint_every_s=checkpoint_every_s,
    )
    coordinator: Any = SparseCoordinator.options(scheduling_strategy=on_the_head()).remote(  # type: ignore[attr-defined]
        assignment.model_dump_json()
    )
    try:
        run = coordinator.run.remote()
        events: list[AttemptEvent] = []
        while not events or events[-1].type != "ended":
            answer = ray.get(coordinator.events.remote(len(events), 1.0))
            events += attempt_events.validate_json(answer)
            watch(coordinator, events)
        ray.get(run)
        return events
    finally:
        ray.kill(coordinator)


def of(events: list[AttemptEvent], kind: str) -> list[Any]:
    return [event for event in events if event.type == kind]


def killer(nodes: list[Any], process: str, at: int) -> Callable[[Any, list[AttemptEvent]], None]:
    """Return a watch that kills one process of a class when a step is reached."""
    killed = list[int]()

    def watch(_: Any, events: list[AttemptEvent]) -> None:
        if killed or not any(event.step >= at for event in of(events, "step")):
            return
        found = [each for node in nodes for each in processes_on(node, process)]
        found[0].kill()
        killed.append(found[0].pid)

    return watch


def test_two_workers_and_two_servers_learn_what_scikit_learn_does(topology: Topology, tmp_path: Path) -> None:
    data, l2, file = load_breast_cancer(), 1e-2, tmp_path / "rows.libsvm"
    features = StandardScaler().fit_transform(data.data)
    dump_svmlight_file(features, data.target, str(file))
    spec = job(
        {"name": "logistic", "l2": l2},
        {"train": str(file), "validation": str(file)},
        workers=2,
        servers=2,
        passes=60,
        batch_size=64,
        learning_rate=0.5,
    )
    events = attempted(spec, topology, tmp_path / "job")
    assert events[-1].type == "ended"
    assert events[-1].outcome == "succeeded", events[-1].reason
    assert "2 workers and 2 servers on" in of(events, "ranges-placed")[0].sentence
    peer = LogisticRegression(C=1 / (l2 * len(features)), tol=1e-8, max_iter=1000).fit(features, data.target)
    expected = log_loss(data.target, peer.predict_proba(features)[:, 1])
    assert of(events, "validated")[-1].loss == pytest.approx(expected, abs=1e-3)
    _, rows = load_rows(of(events, "artifact")[0].path)
    learned = dict(zip(rows.places.tolist(), rows.values[:, 0].tolist(), strict=True))
    places = places_of(np.arange(features.shape[1], dtype=np.uint64))
    coefficients = [learned[place] for place in places.tolist()]
    assert coefficients == pytest.approx(peer.coef_[0].tolist(), abs=0.05)
    assert learned[int(BIAS)] == pytest.approx(float(peer.intercept_[0]), abs=0.05)


@pytest.mark.parametrize("process", ["SparseRowsWorker", "SparseServer"])
def test_a_killed_process_is_replaced_in_mid_training(
    files: dict[str, str], topology: Topology, nodes: list[Any], tmp_path: Path, process: str
) -> None:
    spec = job({"name": "logistic", "l2": 1e-3}, files, passes=60, batch_size=50, staleness=1)
    events = attempted(spec, topology, tmp_path, killer(nodes, process, 20))
    assert events[-1].type == "ended"
    assert events[-1].outcome == "succeeded", events[-1].reason
    [placed] = of(events, "ranges-placed")
    assert len(placed.machines) == 2
    [started] = of(events, "started")
    assert started.total_steps == 60 * ROWS // 2 // 50
    steps = [event.step for event in of(events, "step")]
    assert steps == sorted(set(steps))
    assert steps[-1] == started.total_steps
    measured = of(events, "validated")
    assert [event.step for event in measured] == sorted({event.step for event in measured})
    assert measured[-1].loss < measured[0].loss
    assert measured[-1].auroc > 0.8
    [artifact] = of(events, "artifact")
    settings, rows = load_rows(artifact.path)
    assert settings.model == "logistic"
    assert len(rows.places) == FEATURES + 1
    assert not (tmp_path / "data").exists()


def test_a_killed_worker_of_cocoa_loses_one_round(
    files: dict[str, str], topology: Topology, nodes: list[Any], tmp_path: Path
) -> None:
    spec = job({"name": "svm", "l2": 1e-2}, files, passes=100, workers=3)
    quiet = attempted(spec, topology, tmp_path)
    assert quiet[-1].reason.startswith("solved in 100 rounds"), quiet[-1]  # type: ignore[union-attr]
    disturbed = attempted(spec, topology, tmp_path, killer(nodes, "DualRowsWorker", 3))
    assert [event.loss for event in of(disturbed, "step")] == [event.loss for event in of(quiet, "step")]
    assert disturbed[-1].reason == quiet[-1].reason  # type: ignore[union-attr]
    assert of(quiet, "validated")[-1].accuracy > 0.7


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"name": "svm", "l2": 1e-2}, {"passes": 200, "workers": 3}),
        ({"name": "logistic", "l2": 1e-3}, {"passes": 200, "batch_size": 50, "hogwild_threads": 1}),
    ],
    ids=["cocoa", "hogwild"],
)
def test_a_suspended_attempt_without_servers_continues_with_the_same_result(
    files: dict[str, str], topology: Topology, tmp_path: Path, model: dict[str, Any], training: dict[str, Any]
) -> None:
    spec = job(model, files, **training)
    whole = attempted(spec, topology, tmp_path / "whole")
    asked = list[int]()

    def suspend(coordinator: Any, events: list[AttemptEvent]) -> None:
        if not asked and len(of(events, "step")) > 3:
            asked.append(1)
            ray.get(coordinator.suspend.remote())

    first = attempted(spec, topology, tmp_path / "job", suspend, checkpoint_every_s=0.01)
    last = of(first, "checkpoint")[-1].step
    assert (first[-1].outcome, first[-1].reason) == ("failed", f"suspended after step {last}")  # type: ignore[union-attr]
    second = attempted(spec, topology, tmp_path / "job", checkpoint_every_s=600)
    assert of(second, "started")[0].first_step == last + 1
    losses = {event.step: event.loss for event in (*of(first, "step"), *of(second, "step"))}
    assert losses == {event.step: event.loss for event in of(whole, "step")}
    assert second[-1].reason == whole[-1].reason  # type: ignore[union-attr]
    results = [of(events, "artifact")[0].path.read_bytes() for events in (whole, second)]
    assert results[0] == results[1]


def test_a_machine_leaves_cocoa_in_order(files: dict[str, str], topology: Topology, tmp_path: Path) -> None:
    drained = list[str]()

    def drain(coordinator: Any, events: list[AttemptEvent]) -> None:
        if not drained and of(events, "step"):
            drained.append(of(events, "ranges-placed")[0].machines[0])
            ray.get(coordinator.drain.remote(drained[0]))

    spec = job({"name": "ridge", "l2": 1e-2}, files, passes=150, workers=2)
    quiet = attempted(spec, topology, tmp_path / "quiet")
    found = attempted(spec, topology, tmp_path / "job", drain)
    first, second = (event.machines for event in of(found, "ranges-placed"))
    assert second == tuple(machine for machine in first if machine != drained[0])
    assert found[-1].reason == quiet[-1].reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"name": "svm", "l2": 1e-2}, {"passes": 200, "workers": 3}),
        ({"name": "logistic", "l2": 1e-3}, {"passes": 200, "batch_size": 50, "hogwild_threads": 1}),
        ({"name": "logistic", "l2": 1e-3}, {"passes": 200, "batch_size": 50}),
    ],
    ids=["cocoa", "hogwild", "servers"],
)
def test_the_last_machine_leaves_with_a_checkpoint(
    files: dict[str, str], topology: Topology, tmp_path: Path, model: dict[str, Any], training: dict[str, Any]
) -> None:
    asked = list[str]()

    def drain(coordinator: Any, events: list[AttemptEvent]) -> None:
        if not asked and len(of(events, "step")) > 3:
            asked.extend(of(events, "ranges-placed")[0].machines)
            ray.get([coordinator.drain.remote(machine) for machine in asked])

    spec = job(model, files, **training)
    first = attempted(spec, topology, tmp_path, drain, checkpoint_every_s=600)
    [saved] = of(first, "checkpoint")
    assert (first[-1].outcome, first[-1].reason) == ("failed", f"suspended after step {saved.step}")  # type: ignore[union-attr]
    second = attempted(spec, topology, tmp_path, checkpoint_every_s=600)
    assert of(second, "started")[0].first_step == saved.step + 1
    assert second[-1].outcome == "succeeded"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "training", "metric"),
    [
        ({"name": "ridge", "l2": 1e-2}, {"passes": 8}, "rmse"),
        ({"name": "factorization_machine"}, {"passes": 2, "hogwild_threads": 2}, "auroc"),
        (
            {"name": "matrix_factorization", "factors": 2},
            {"passes": 3, "batch_size": 16, "staleness": "unbounded", "values": "int8"},
            "rmse",
        ),
        ({"name": "lda", "topics": 2}, {"passes": 3, "batch_size": 10, "servers": 2}, "perplexity"),
    ],
    ids=["ridge", "hogwild", "ratings", "topics"],
)
def test_each_kind_of_model_is_trained_and_measured(
    files: dict[str, str],
    topology: Topology,
    tmp_path: Path,
    model: dict[str, Any],
    training: dict[str, Any],
    metric: str,
) -> None:
    events = attempted(job(model, files, **training), topology, tmp_path)
    assert events[-1].type == "ended"
    assert events[-1].outcome == "succeeded", events[-1].reason
    assert of(events, "step")[-1].step == of(events, "started")[0].total_steps
    assert getattr(of(events, "validated")[-1], metric) is not None
    assert of(events, "artifact")[0].path.stat().st_size > 0


@pytest.mark.parametrize(
    ("model", "training", "target"),
    [
        ({"name": "svm", "l2": 1e-2}, {}, {"metric": "duality_gap", "value": 0.05}),
        ({"name": "logistic", "l2": 1e-3}, {"batch_size": 50}, {"metric": "auroc", "value": 0.6}),
        (
            {"name": "logistic", "l2": 1e-3},
            {"batch_size": 50, "hogwild_threads": 2},
            {"metric": "validation_loss", "value": 0.68},
        ),
    ],
    ids=["gap", "servers", "hogwild"],
)
def test_a_job_ends_at_its_target(
    files: dict[str, str],
    topology: Topology,
    tmp_path: Path,
    model: dict[str, Any],
    training: dict[str, Any],
    target: dict[str, Any],
) -> None:
    spec = job(model, files, passes=5_000, target=target, **training)
    assert spec.training.target is not None
    events = attempted(spec, topology, tmp_path)
    [reached] = of(events, "target-reached")
    assert reached.metric == target["metric"]
    assert spec.training.target.is_met(reached.value)
    assert reached.seconds > 0
    assert (reached.sent_bytes > 0) == ("hogwild_threads" not in training)
    last = events[-1]
    assert last.type == "ended"
    assert last.outcome == "succeeded"
    assert f"reached the target {target['value']} after step {reached.step}" in last.reason
    assert of(events, "step")[-1].step < of(events, "started")[0].total_steps
    assert of(events, "artifact")[0].size_bytes > 0


def test_a_job_is_cancelled_and_a_machine_leaves(
    files: dict[str, str], topology: Topology, tmp_path: Path
) -> None:
    done = list[str]()

    def watch(coordinator: Any, events: list[AttemptEvent]) -> None:
        steps = of(events, "step")
        if steps and not done:
            ray.get(coordinator.drain.remote(of(events, "ranges-placed")[0].machines[0]))
            done.append("drained")
        places = of(events, "ranges-placed")
        if len(places) > 1 and len(done) == 1:
            assert len(places[-1].machines) == len(places[0].machines) - 1
            assert places[0].machines[0] not in places[-1].machines
            done.append(str(steps[-1].step))
        if len(done) == 2 and steps[-1].step > int(done[1]) + 10:
            ray.get(coordinator.cancel.remote())
            done.append("cancelled")

    spec = job({"name": "logistic"}, files, passes=10_000, batch_size=50, workers=3)
    events = attempted(spec, topology, tmp_path, watch)
    assert events[-1].type == "ended"
    assert (events[-1].outcome, events[-1].reason) == ("cancelled", "cancelled on request")
    assert done[-1] == "cancelled"


def test_wrong_rows_end_the_attempt_with_file_and_line(
    files: dict[str, str], topology: Topology, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.libsvm"
    bad.write_text("1 3:1\n0 9223372036854775808:1\n")
    spec = job({"name": "logistic"}, {**files, "train": str(bad)})
    ended = attempted(spec, topology, tmp_path / "job")[-1]
    assert ended.type == "ended"
    assert ended.outcome == "failed"
    assert "line 2: key 9223372036854775808 is not below 2^63" in ended.reason
    assert ended.error is not None
    assert ended.error["hint"]
