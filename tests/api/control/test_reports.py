"""Reports of jobs for other programs, written by a real control plane and read back with their own packages."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.conftest import Plane, wait_until
from tests.api.playing import falling_step

from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    LinkBytes,
    TrafficMeasured,
    Validated,
)
from share_compute.lifecycle.folders import REPORTS
from share_compute.lifecycle.states import JobState
from share_compute.store.retention import Keep
from share_compute_api.client.client import Client
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.jobs.reports import ReportSupervisor


def ended(plane: Plane, http: httpx.Client, job: dict[str, Any]) -> str:
    """Submit a job, report three steps and its end, and return its id."""
    answer = http.post("/jobs", json=job)
    assert answer.status_code == 201, answer.text
    job_id = str(answer.json()["id"])
    store = plane.store
    store.jobs.begin(job_id, [])
    store.jobs.move(job_id, JobState.running, "running", attempt=1)
    traffic = TrafficMeasured(step=3, machines={"ada": LinkBytes(sent_bytes=10, received_bytes=7)})
    validated = Validated(split="validation", step=2, loss=0.25, accuracy=0.5)
    steps = [falling_step(number, seconds=2) for number in (1, 2, 3)]
    events = [*steps[:2], validated, steps[2], traffic, AttemptEnded(outcome="succeeded", reason="done")]
    store.progress.record(job_id, 1, events)
    return job_id


def fetched(client: Client, job_id: str, name: str, folder: Path) -> Path:
    """Wait for a report, and return the folder to which it was downloaded."""
    wait_until(lambda: name in [artifact.name for artifact in client.artifacts(job_id)])
    return client.download(job_id, name, folder)


def test_event_files_for_tensorboard_have_the_curves(
    plane: Plane, http: httpx.Client, client: Client, digits: dict[str, Any], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job_id = ended(plane, http, {**digits, "report": ["tensorboard"]})
    folder = fetched(client, job_id, "tensorboard", tmp_path / "out")
    assert [path.name.split(".")[:3] for path in folder.iterdir()] == [["events", "out", "tfevents"]]
    found = EventAccumulator(str(folder))
    found.Reload()
    losses = found.Scalars("train/loss")
    assert [(event.step, event.value) for event in losses] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert losses[2].wall_time - losses[0].wall_time == pytest.approx(4)
    assert [event.value for event in found.Scalars("validation/accuracy")] == [0.5]
    assert [event.value for event in found.Scalars("traffic/sent_bytes")] == [10]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload``")  # MLflow asks for it when it reads
def test_a_database_of_mlflow_has_the_curves_and_the_settings(
    plane: Plane, http: httpx.Client, client: Client, digits: dict[str, Any], tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    job_id = ended(plane, http, {**digits, "report": ["mlflow"]})
    folder = fetched(client, job_id, "mlflow", tmp_path / "out")
    assert [path.name for path in folder.iterdir()] == ["mlflow.db"]
    found = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = found.get_experiment_by_name("share-compute")
    assert experiment is not None
    (run,) = found.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.tags["share_compute.job"]) == ("FINISHED", job_id)
    assert run.data.params["training.steps"] == str(digits["training"]["steps"])
    losses = found.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in losses] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert losses[2].timestamp - losses[0].timestamp == pytest.approx(4000, abs=2)
    assert run.data.metrics["validation/accuracy"] == 0.5
    assert str(plane.settings.data_folder).encode() not in (folder / "mlflow.db").read_bytes()


def test_an_offline_run_for_wandb_has_the_curves(
    plane: Plane, http: httpx.Client, client: Client, digits: dict[str, Any], tmp_path: Path
) -> None:
    job_id = ended(plane, http, {**digits, "report": ["wandb"]})
    folder = fetched(client, job_id, "wandb", tmp_path / "out")
    (run,) = folder.glob("wandb/offline-run-*")
    content = (run / f"run-{job_id}.wandb").read_bytes()
    for text in (b"train/loss", b"0.3333", b"validation/accuracy", b"traffic/sent_bytes", b"share-compute"):
        assert text in content
    assert str(plane.settings.data_folder).encode() not in content


def test_a_format_that_is_not_installed_is_refused(
    http: httpx.Client, digits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("share_compute_api.submission.jobs.find_spec", lambda _: None)
    refused = http.post("/jobs", json={**digits, "report": ["tensorboard", "wandb"]}).json()
    assert [one["field"] for one in refused["details"]["fields"]] == ["report", "report"]
    assert "pip install 'share-compute[tensorboard]'" in refused["hint"]
    for wrong in (["excel"], ["wandb", "wandb"], "wandb"):
        answer = http.post("/jobs", json={**digits, "report": wrong})
        assert (answer.status_code, answer.json()["details"]["fields"][0]["field"][:6]) == (422, "report")


def test_a_report_that_cannot_be_written_is_noted_once(
    plane: Plane, http: httpx.Client, digits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("share_compute_api.submission.jobs.find_spec", lambda _: True)
    # A file is in the place of the folder of all reports.
    (plane.settings.data_folder / REPORTS).write_text("")
    job_id = ended(plane, http, {**digits, "report": ["tensorboard"]})

    def notes(job: str) -> list[str]:
        return [event["data"]["message"] for event in http.get(f"/jobs/{job}/events").json()["events"]
                if event["kind"] == "note"]  # fmt: skip

    wait_until(lambda: notes(job_id))
    assert notes(job_id)[0].startswith("the report for tensorboard could not be written")
    # Reports are tried in the order of their jobs' ends. So the first one was due again when the second one is noted.
    second = ended(plane, http, {**digits, "report": ["tensorboard"]})
    wait_until(lambda: notes(second))
    assert len(notes(job_id)) == 1
    after_restart = ReportSupervisor(plane.store, plane.settings.data_folder, lambda _: iter(()), Notifier())

    async def run_until_noted() -> None:
        running = asyncio.create_task(after_restart.run())
        await asyncio.to_thread(wait_until, lambda: len(notes(second)) == 2)
        running.cancel()

    asyncio.run(run_until_noted())
    assert len(notes(job_id)) == 2
    assert http.get(f"/jobs/{job_id}").json()["state"] == "succeeded"


@pytest.mark.slow
def test_a_report_is_deleted_with_its_job_and_not_written_again(
    plane: Plane, http: httpx.Client, client: Client, digits: dict[str, Any], tmp_path: Path
) -> None:
    job_id = ended(plane, http, {**digits, "report": ["tensorboard"]})
    fetched(client, job_id, "tensorboard", tmp_path / "out")
    folder = plane.settings.data_folder / REPORTS / job_id
    client.delete_artifact(job_id, "tensorboard")
    wait_until(lambda: not (folder / "tensorboard").exists())
    # The report counts as written even after its events were pruned.
    plane.store.retention.prune(Keep(events_days=1e-6), plane.settings.data_folder)
    assert plane.store.progress.unreported(plane.store.jobs.get(job_id).created_at) == []
    client.delete_job(job_id)
    wait_until(lambda: not folder.exists())


def test_a_report_that_hangs_does_not_delay_others(
    plane: Plane, http: httpx.Client, client: Client, digits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[bytes] = []

    async def run_module(_module: str, *, request: bytes, **_: Any) -> tuple[int, bytes, str]:
        began.append(request)
        if b"stuck" in request:
            await asyncio.sleep(3600)
        return 0, b"", ""

    monkeypatch.setattr("share_compute_api.submission.jobs.find_spec", lambda _: True)
    monkeypatch.setattr("share_compute_api.control.jobs.reports.run_module", run_module)
    ended(plane, http, {**digits, "name": "stuck", "report": ["tensorboard"]})
    wait_until(lambda: began)
    job_id = ended(plane, http, {**digits, "report": ["tensorboard", "wandb"]})
    wait_until(lambda: len(client.artifacts(job_id)) == 2)
    job, saved = plane.store.jobs.get(job_id), ArtifactSaved(name="wandb", path=Path("w"), size_bytes=0)
    assert [
        found.name for found, _ in plane.store.progress.unreported(job.created_at - timedelta(hours=1))
    ] == ["stuck"]
    before = job.model_copy(update={"finished_at": job.created_at})
    assert not plane.store.progress.add_report(before, saved)
