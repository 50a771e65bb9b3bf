"""Metrics of training jobs for Prometheus, from the events of attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.api.conftest import Plane

from share_compute.lifecycle.attempt_events import (
    AttemptEvent,
    BranchRound,
    LinkBytes,
    Note,
    RoundMerged,
    TrafficMeasured,
    Validated,
)
from share_compute_api.control.jobs.training_metrics import TrainingMetrics, metered

PREFIX = "share_compute_training_"


def values(text: str, name: str, **labels: str) -> list[float]:
    """Return the values of a metric, in the order of its labels."""
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
    ]
    return [sample.value for sample in sorted(samples, key=lambda one: sorted(one.labels.items()))]


def traffic(**machines: tuple[int, int]) -> TrafficMeasured:
    links = {
        machine: LinkBytes(sent_bytes=sent, received_bytes=received)
        for machine, (sent, received) in machines.items()
    }
    return TrafficMeasured(step=1, machines=links)


def merge(
    number: int, *, missing: tuple[int, ...] = (), late: int = 0, distance: float | None = None
) -> RoundMerged:
    branches = tuple(
        BranchRound(
            number=branch,
            round=number - late,
            machines=("c0",),
            samples=8,
            seconds=30.0,
            waited_s=2.0,
            sent_bytes=100,
        )
        for branch in range(3)
        if branch not in missing
    )
    return RoundMerged(
        round=number,
        step=4 * number,
        branches=branches,
        missing=missing,
        update_bytes=50,
        weight_bytes=3_000,
        consensus_distance=distance,
        merge_s=0.5,
    )


def test_bytes_are_added_for_each_machine_of_each_job() -> None:
    metrics = TrainingMetrics()
    metrics.observe("a", [traffic(ada=(10, 20), bob=(1, 2))])
    metrics.observe("a", [Note(message="nothing to count"), traffic(ada=(5, 0))])
    metrics.observe("b", [traffic(ada=(7, 0))])
    text = metrics.exposition().decode()
    assert values(text, "sent_bytes_total", job="a") == [15, 1]
    assert values(text, "received_bytes_total", job="a") == [20, 2]
    assert values(text, "sent_bytes_total", contributor="ada") == [15, 7]


def test_rounds_are_counted_for_each_branch() -> None:
    metrics = TrainingMetrics()
    metrics.observe("a", [merge(1), merge(2, missing=(1,)), merge(3, late=1)])
    text = metrics.exposition().decode()
    assert values(text, "round") == [3]
    assert values(text, "missing_branches") == [0]
    assert values(text, "branch_missed_rounds_total", branch="1") == [1]
    assert values(text, "branch_computing_seconds_total") == [90, 60, 90]
    assert values(text, "branch_waiting_seconds_total") == [6, 4, 6]
    assert values(text, "branch_sent_bytes_total") == [300, 200, 300]
    assert values(text, "branch_staleness_rounds") == [1, 1, 1]
    assert values(text, "update_bytes_total") == [150]
    assert values(text, "merge_seconds_total") == [1.5]
    assert values(text, "compression_ratio") == [2 * 3 * 3_000 / (3 * 100 + 3 * 50)]


def test_the_consensus_distance_is_shown_where_branches_have_weights_of_their_own() -> None:
    metrics = TrainingMetrics()
    metrics.observe("gossip", [merge(1, distance=0.5), merge(2, distance=0.25)])
    metrics.observe("local", [merge(1)])
    text = metrics.exposition().decode()
    assert values(text, "consensus_distance") == [0.25]
    assert values(text, "consensus_distance", job="local") == []


def test_the_last_validation_and_test_are_shown_by_metric() -> None:
    metrics = TrainingMetrics()
    metrics.observe("a", [Validated(split="validation", step=1, loss=3.0, accuracy=0.25)])
    metrics.observe("a", [Validated(split="validation", step=2, loss=2.0, accuracy=0.5)])
    metrics.observe("a", [Validated(split="test", step=2, loss=2.5, rmse=7.0)])
    text = metrics.exposition().decode()
    assert values(text, "metric", split="validation", metric="loss") == [2.0]
    assert values(text, "metric", split="validation", metric="accuracy") == [0.5]
    assert values(text, "metric", split="test") == [2.5, 7.0]


def test_the_number_of_series_is_bounded() -> None:
    metrics = TrainingMetrics()
    machines = {f"c{number:04}": (1, 0) for number in range(1_000)}
    for job in range(80):
        metrics.observe(f"job-{job:02}", [traffic(**machines), traffic(**machines)])
    text = metrics.exposition().decode()
    assert len({line.split("job=")[1][:8] for line in text.splitlines() if "job=" in line}) == 50
    assert values(text, "sent_bytes_total", job="job-00") == []
    last = values(text, "sent_bytes_total", job="job-79")
    assert len(last) == 257
    assert sum(last) == 2_000
    assert values(text, "sent_bytes_total", job="job-79", contributor="other") == [2 * (1_000 - 256)]


def test_events_that_are_read_again_count_once() -> None:
    feed: Sequence[AttemptEvent] = [traffic(ada=(10, 0)), traffic(ada=(20, 0))]

    class Fed:
        async def events(self, after: int, timeout_s: float) -> list[AttemptEvent]:  # noqa: ARG002
            return list(feed[after:])

    async def run() -> None:
        fed: Any = Fed()

        async def launch(_: Any) -> Any:
            return fed

        assignment: Any = type("Assigned", (), {"job_id": "a"})()
        attempt = await metered(launch, metrics)(assignment)
        for after in (0, 0, 1, 2):
            assert await attempt.events(after, 0.0) == list(feed[after:])

    metrics = TrainingMetrics()
    asyncio.run(run())
    assert values(metrics.exposition().decode(), "sent_bytes_total") == [30]


def test_prometheus_receives_them_beside_those_of_served_models(plane: Plane) -> None:
    plane.app.state.context.training_metrics.observe("a", [traffic(ada=(10, 20)), merge(1)])
    answer = httpx.get(plane.url + "/metrics", headers={"Authorization": f"Bearer {plane.api_key}"})
    assert values(answer.text, "received_bytes_total", job="a", contributor="ada") == [20]
    assert "share_compute_num_requests_unplaced" in answer.text
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
