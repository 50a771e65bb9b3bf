"""Utilization of machines: reported by agents, and shown over REST, to Prometheus and in the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import httpx
import pytest
from tests.api.conftest import Plane

from share_compute_api.agent.client import AgentClient
from share_compute_api.client.client import Client
from share_compute_api.client.load import LoadReader
from share_compute_api.control.machines import utilization
from share_compute_api.control.machines.utilization import UtilizationMonitor
from share_compute_api.schemas.utilization import Utilization

USED = Utilization(cpu_fraction=0.75, memory_bytes=2**31, cpu_celsius=61.5, sent_bytes_per_s=2e6)
START = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def machine(plane: Plane) -> tuple[str, str]:
    """Return the id and the key of a machine that joined."""
    store = plane.store
    record, key = store.contributors.join(
        store.invites.create()[1], name="ada", host="h", versions={}, limits={"cpu_threads": 1}
    )
    return record.id, key


def test_what_an_agent_reports_is_shown_everywhere(
    plane: Plane,
    client: Client,
    http: httpx.Client,
    machine: tuple[str, str],
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(utilization, "FRESH", timedelta(hours=1))
    contributor_id, key = machine
    assert http.get(f"/contributors/{contributor_id}").json()["utilization"] is None
    assert client.utilization().machines == {}
    with AgentClient(plane.url, contributor_id, key) as agent:
        agent.heartbeat()
        agent.heartbeat(USED)
    shown = http.get(f"/contributors/{contributor_id}").json()["utilization"]
    assert {
        name: shown[name] for name in ("cpu_fraction", "memory_bytes", "cpu_celsius", "gpu_fraction")
    } == {
        "cpu_fraction": 0.75,
        "memory_bytes": 2**31,
        "cpu_celsius": 61.5,
        "gpu_fraction": None,
    }
    assert http.get(f"/contributors/{contributor_id}/utilization").json()["samples"] == [shown]
    wanted = {"machine": [contributor_id, "con-unknown"], "points": 60}
    found = http.get("/cluster/utilization", params=wanted).json()["machines"]
    assert found == {contributor_id: {"latest": shown, "busy": [*([None] * 59), 0.75]}}
    (load,) = LoadReader(client).read().machines
    assert (load.busy_fraction, load.memory_bytes) == (0.75, 2**31)
    text = httpx.get(f"{plane.url}/metrics", headers={"Authorization": f"Bearer {plane.api_key}"}).text
    assert f'share_compute_machine_cpu_ratio{{contributor="{contributor_id}"}} 0.75' in text
    assert "75%" in run("contributors").stdout
    assert json.loads(run("contributors", "--json").stdout)["items"][0]["utilization"] == shown
    assert "62 °C" in run("top", "--once").stdout


@pytest.mark.parametrize(
    "figures",
    [
        '{"cpu_fraction": 1.5}',
        '{"cpu_fraction": NaN}',
        '{"cpu_celsius": 1e300}',
        '{"memory_bytes": -1}',
        '{"sent_bytes_per_s": Infinity}',
        '{"cpu_fraction": [0.1, 0.2]}',
        '{"disk_fraction": 0.5}',
    ],
)
def test_impossible_figures_are_refused(plane: Plane, machine: tuple[str, str], figures: str) -> None:
    contributor_id, key = machine
    answer = httpx.post(
        f"{plane.url}/api/v1/contributors/{contributor_id}/heartbeat",
        content=f'{{"utilization": {figures}}}',
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    assert answer.status_code == 422
    assert plane.app.state.context.utilization.latest(contributor_id) is None


def test_the_last_hour_is_kept_in_bounded_memory() -> None:
    now = START
    monitor = UtilizationMonitor(lambda: now)
    for second in range(2 * 3600):
        now = START + timedelta(seconds=second)
        monitor.add("ada", Utilization(cpu_fraction=second / 7200), now)
    samples = monitor.history("ada").samples
    assert len(samples) == 720
    assert samples[-1].at == now
    assert samples[-1].cpu_fraction == pytest.approx(7199 / 7200, abs=1e-4)
    gaps = [after.at - before.at for before, after in pairwise(samples)]
    assert min(gaps[:-1]) == timedelta(seconds=5)
    busy = monitor.cluster(points=4).machines["ada"].busy
    assert busy == pytest.approx((0.5625, 0.6875, 0.8125, 0.9375), abs=1e-3)
    now += timedelta(minutes=2)
    assert monitor.latest("ada") is None
    assert monitor.cluster().machines == {}
    now += timedelta(hours=1)
    monitor.add("bob", USED, now)
    assert monitor.history("ada").samples == ()


def test_the_busy_part_is_that_of_the_lent_gpu() -> None:
    monitor = UtilizationMonitor(lambda: START)
    monitor.add("ada", Utilization(cpu_fraction=0.1, gpu_fraction=0.9), START)
    found = monitor.cluster(points=1).machines["ada"]
    assert (found.latest.busy_fraction, found.busy) == (0.9, (0.9,))


def test_prometheus_gets_machines_that_report_now() -> None:
    now = START
    monitor = UtilizationMonitor(lambda: now)
    for number in range(300):
        monitor.add(f"con-a{number:03}", USED, now)
    now += timedelta(minutes=10)
    monitor.add("con-b", USED, now)
    assert 'share_compute_machine_cpu_ratio{contributor="con-b"} 0.75' in monitor.exposition().decode()
