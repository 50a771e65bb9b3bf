"""``share-compute top``: the load of a cluster as tables, as JSON and as lines."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console
from tests.api.conftest import Plane
from tests.api.playing import Cluster, laid, step

from share_compute.lifecycle.attempt_events import LinkBytes, Measured, Planned, TrafficMeasured
from share_compute.lifecycle.states import JobState
from share_compute_api.client.client import Client
from share_compute_api.client.load import ClusterLoad, DeploymentLoad, JobLoad, LoadReader, MachineLoad
from share_compute_api.control.patience import Patience
from share_compute_api.terminal.load import changes, load_tables

START = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def job_id(plane: Plane, client: Client, digits: dict[str, Any], tmp_path: Any) -> str:
    """Return the id of a job that runs on one of two machines."""
    cluster = Cluster(plane.store, tmp_path, Patience())
    ada, _ = cluster.contributor("ada"), cluster.contributor("bob")
    made = client.submit({**digits, "training": {"steps": 10}}).id
    store = plane.store
    store.jobs.begin(made, [ada])
    store.jobs.move(made, JobState.running, "running", attempt=1)
    measured = Measured(step=2, predicted_step_s=1.0, measured_step_s=2.0, stages=(), machines={ada: 1.5})
    store.progress.record(made, 1, [Planned(plan=laid(ada)), step(1), step(2), measured])
    for _ in range(2):
        link = LinkBytes(sent_bytes=1000, received_bytes=3000)
        store.progress.record(made, 1, [TrafficMeasured(step=2, machines={ada: link})])
    return made


def test_the_load_is_read_from_the_server(client: Client, job_id: str) -> None:
    load = LoadReader(client).read()
    ada, bob = load.machines
    assert (ada.name, ada.work, ada.busy_fraction, ada.memory_bytes) == ("ada", "digits", 0.75, 1)
    assert (ada.start, ada.stop) == (0, 1)
    assert ada.received_bytes_per_s == pytest.approx(3 * (ada.sent_bytes_per_s or 0))
    assert (bob.state, bob.work, bob.busy_fraction, bob.sent_bytes_per_s) == ("ready", None, None, None)
    (job,) = load.jobs
    assert (job.id, job.state, job.done, job.total, job.unit) == (job_id, "running", 2, 10, "steps")
    # Each step has 16 samples, and the job computes one a second.
    assert (job.per_s, job.is_tokens, job.left_s) == (1, False, 8 * 16)


@pytest.mark.slow
def test_once_prints_tables_or_json(job_id: str, run: Any) -> None:
    text = run("top", "--once").stdout
    assert "machines: 1 at work, 1 ready" in text
    assert job_id in text
    assert "75%" in text
    document = json.loads(run("top", "--once", "--json").stdout)
    assert [one["name"] for one in document["machines"]] == ["ada", "bob"]
    assert document["jobs"][0]["loss"] == 1.0
    assert document["deployments"] == []


def load() -> ClusterLoad:
    machine = MachineLoad(
        id="con-a2b3c4d5", name="ada", state="ready", reason="measured", work="digits", start=0, stop=4,
        busy_fraction=0.5, memory_bytes=2**30, lent_bytes=2**31, sent_bytes_per_s=1e6, received_bytes_per_s=2e6,
    )  # fmt: skip
    job = JobLoad(
        id="job-k3v7q2ma", name="digits", kind="train", state="running", reason="running", done=5, total=10,
        unit="steps", loss=0.25, per_s=1234.0, is_tokens=True, left_s=61,
    )  # fmt: skip
    deployment = DeploymentLoad(
        id="dep-a2b3c4d5", name="llama", state="ready", reason="ready", ready=1, wanted="0..4", tokens_per_s=40,
        running=3, queued=2, kv_fraction=0.25,
    )  # fmt: skip
    return ClusterLoad("http://127.0.0.1:8700", START, (machine,), (job,), (deployment,))


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_all_figures_are_shown_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    console = Console(width=columns)
    with console.capture() as capture:
        console.print(load_tables(load(), console), crop=False)
    text = capture.get()
    assert max(map(len, text.splitlines())) <= columns
    words = " ".join(text.split())
    for part in (
        "job-k3v7q2ma",
        "1.0 GiB of 2.0 GiB",
        "5/10",
        "1,234 tokens/s",
        "1 min 1 s",
        "0..4",
        "layers 0-3",
    ):
        assert part in words


def test_only_changes_are_lines() -> None:
    first = load()
    assert len(changes(None, first)) == 3
    assert changes(first, dataclasses.replace(first, at=START + timedelta(seconds=2))) == []
    (job,) = first.jobs
    later = dataclasses.replace(first, jobs=(dataclasses.replace(job, done=6),), deployments=())
    gone, stepped = changes(first, later)
    assert gone.endswith("deployment llama  gone")
    at = f"{START.astimezone():%Y-%m-%d %H:%M:%S}"
    assert (
        stepped
        == f"{at}  job job-k3v7q2ma  running  done 6/10  loss 0.25  speed 1,234 tokens/s  left 1 min 1 s  digits"
    )
