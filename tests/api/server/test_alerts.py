"""Alerts for operators: each kind begins and ends when it should."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
from tests.databases import make_schema
from tests.isolated import shared_processes

from share_compute.lifecycle.attempt_events import AttemptEnded
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState
from share_compute.settings import Settings
from share_compute.specification import parse_deployment, parse_job
from share_compute.store import ContributorRecord, Store
from share_compute.store.store import utc_now
from share_compute_api.client.client import Client
from share_compute_api.cluster.cluster import ClusterInfo
from share_compute_api.schemas.versions import local_versions
from share_compute_api.server.alerts import REMEMBERED, UNRESPONSIVE_AFTER, AlertWatch, find_alerts
from share_compute_api.server.context import Context
from share_compute_api.server.sessions import Sessions

CLUSTER = SimpleNamespace(info=ClusterInfo("192.0.2.1:6379", "token", "ab", "192.0.2.1"), trouble=None)


class Cluster:
    """A store with a clock that the test sets, under a server with a cluster."""

    def __init__(self, folder: Path) -> None:
        settings = Settings(data_folder=folder, database_url=None)
        make_schema(settings.resolved_database_url)
        self.store = Store(settings.resolved_database_url, clock=lambda: self.now)
        self.now = utc_now()
        self.context = Context(
            settings=settings,
            store=self.store,
            cluster=CLUSTER,
            sessions=Sessions(folder, timedelta(days=7)),
            started_at=self.now,
            isolated=shared_processes(),
        )

    def wait(self, time: timedelta) -> None:
        self.now += time + timedelta(seconds=1)

    def kinds(self) -> list[str]:
        return [alert.kind for alert in find_alerts(self.context)]

    def join(self, name: str, **versions: str) -> ContributorRecord:
        _, code = self.store.invites.create(expires_in_s=1e6)
        known = {**local_versions().model_dump(), **versions}
        record, _ = self.store.contributors.join(code, name=name, host="h", versions=known, limits={})
        self.store.contributors.online(record.id, node_id="ab", address="192.0.2.7")
        return self.store.contributors.ready(record.id, capacity=[], links=[])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.store.close()


def test_a_cluster_that_is_well_has_none(cluster: Cluster) -> None:
    cluster.join("ash")
    assert cluster.kinds() == []


def test_a_lost_machine_is_reported_for_an_hour_or_until_it_is_back(cluster: Cluster) -> None:
    for name in ("ash", "birch"):
        cluster.store.contributors.set_state(cluster.join(name), ContributorState.lost, "its node died")
    cluster.join("birch")
    (alert,) = find_alerts(cluster.context)
    assert (alert.kind, alert.text) == ("machine-lost", "machine ash was lost: its node died")
    assert alert.since == cluster.now
    cluster.wait(REMEMBERED)
    assert "machine-lost" not in cluster.kinds()


def test_a_machine_that_left_is_not_missed(cluster: Cluster) -> None:
    machine = cluster.join("ash")
    cluster.store.contributors.leave(machine.id)
    cluster.store.contributors.set_state(
        cluster.store.contributors.get(machine.id), ContributorState.left, "its owner takes it back"
    )
    assert cluster.kinds() == []


def test_an_unresponsive_machine_is_reported_until_it_answers(cluster: Cluster) -> None:
    machine = cluster.join("ash")
    seen_at = cluster.now
    cluster.wait(UNRESPONSIVE_AFTER)
    (alert,) = find_alerts(cluster.context)
    assert (alert.kind, alert.contributor_id, alert.since) == ("machine-unresponsive", machine.id, seen_at)
    cluster.store.heartbeats.note(machine.id)
    assert cluster.kinds() == []


def test_no_machine_is_unresponsive_to_a_server_that_just_began(cluster: Cluster) -> None:
    cluster.join("ash")
    cluster.wait(UNRESPONSIVE_AFTER)
    cluster.context.started_at = cluster.now
    assert cluster.kinds() == []


def test_versions_that_do_not_work_together_are_reported_and_others_are_not(cluster: Cluster) -> None:
    cluster.join("ash", torch="0.1.0")
    cluster.join("birch", share_compute=local_versions().share_compute + "+local")
    (alert,) = find_alerts(cluster.context)
    assert alert.kind == "versions-differ"
    assert "machine ash does not fit: the server runs torch" in alert.text
    assert alert.hint


def test_a_job_that_waits_is_reported_with_its_reason(cluster: Cluster, digits: dict[str, Any]) -> None:
    job = cluster.store.jobs.create(parse_job(digits))
    submitted_at = cluster.now
    assert cluster.kinds() == []
    cluster.wait(timedelta(minutes=10))
    cluster.store.jobs.explain(job.id, "waiting for contributors: needs 1, none is ready")
    (alert,) = find_alerts(cluster.context)
    assert alert.text == "job digits waits: waiting for contributors: needs 1, none is ready"
    assert (alert.since, alert.job_id) == (submitted_at, job.id)
    cluster.store.jobs.cancel(job.id)
    assert cluster.kinds() == []


def test_a_job_waits_since_it_was_put_back(cluster: Cluster, digits: dict[str, Any]) -> None:
    job = cluster.store.jobs.create(parse_job(digits))
    cluster.wait(timedelta(minutes=10))
    cluster.store.jobs.begin(job.id, [])
    cluster.store.jobs.requeue(job.id, "a machine was lost", attempt=1)
    assert cluster.kinds() == []
    cluster.wait(timedelta(minutes=10))
    assert cluster.kinds() == ["job-waits"]


def test_a_job_that_is_lost_again_and_again_is_reported_at_once(
    cluster: Cluster, digits: dict[str, Any]
) -> None:
    job = cluster.store.jobs.create(parse_job(digits))
    cluster.store.jobs.begin(job.id, [])
    cluster.store.jobs.requeue(job.id, "a machine was lost", attempt=1, fruitless_attempts=2)
    assert cluster.kinds() == ["job-fruitless"]


def test_a_failed_job_is_reported_first_and_for_an_hour(cluster: Cluster, digits: dict[str, Any]) -> None:
    cluster.store.contributors.set_state(cluster.join("ash"), ContributorState.lost, "its node died")
    job = cluster.store.jobs.create(parse_job(digits))
    begun = cluster.store.jobs.begin(job.id, [])
    ended = AttemptEnded(outcome="failed", reason="the loss is not finite", error={"hint": "lower the rate"})
    cluster.store.progress.record(job.id, begun.attempt, [ended])
    first, second = find_alerts(cluster.context)
    assert (first.kind, first.severity, first.hint) == ("job-failed", "error", "lower the rate")
    assert second.kind == "machine-lost"
    cluster.wait(REMEMBERED)
    assert cluster.kinds() == []


def test_deployments_that_fail_lose_a_part_or_wait_are_reported(cluster: Cluster, tmp_path: Path) -> None:
    spec = {"name": "llama", "model": {"path": str(tmp_path)}, "max_seq": 64}
    deployments = cluster.store.deployments
    one = deployments.create(parse_deployment(spec), reason="submitted")
    assert cluster.kinds() == []
    cluster.wait(timedelta(minutes=10))
    assert cluster.kinds() == ["deployment-waits"]
    deployments.set_state(one.id, DeploymentState.loading, "loading")
    deployments.set_state(one.id, DeploymentState.degraded, "a machine was lost")
    assert cluster.kinds() == ["deployment-degraded"]
    deployments.set_state(one.id, DeploymentState.failed, "its folder is gone")
    assert cluster.kinds() == ["deployment-failed"]


def test_changes_are_reported_by_an_event_and_nothing_else_is(cluster: Cluster) -> None:
    cluster.store.contributors.set_state(cluster.join("ash"), ContributorState.lost, "its node died")
    watch, start = AlertWatch(cluster.context), cluster.store.events.last_seq()
    watch.poll()
    watch.poll()
    assert cluster.store.events.last_seq() == start
    cluster.wait(REMEMBERED)
    watch.poll()
    (event,) = cluster.store.events.after(start)
    assert event.kind == "alerts"
    assert event.data == {"began": [], "ended": ["machine ash was lost: its node died"]}
    assert (event.job_id, event.contributor_id) == (None, None)


def test_a_cluster_that_cannot_be_used_is_reported_until_it_can(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CLUSTER, "trouble", "the Ray head ended with status -9")
    (alert,) = find_alerts(cluster.context)
    assert (alert.kind, alert.severity) == ("no-cluster", "error")
    assert "the Ray head ended with status -9" in alert.text
    monkeypatch.undo()
    assert cluster.kinds() == []


def test_a_server_without_a_cluster_says_so_everywhere(
    plane: Any, client: Client, run: Callable[..., CompletedProcess[str]], digits: dict[str, Any]
) -> None:
    (alert,) = client.alerts()
    assert (alert.kind, alert.severity) == ("no-cluster", "error")
    shown = run("status")
    assert "error the server runs without a cluster" in shown.stdout
    assert "start it with `share-compute up`" in shown.stdout
    assert json.loads(run("status", "--json").stdout)["alerts"][0]["id"] == "no-cluster"
    job = plane.store.jobs.create(parse_job(digits))
    assert [one.id for one in client.queue()] == [job.id]
    status = client.status()
    assert status.versions == local_versions()
    assert status.disk_free_bytes > 0
