"""Deletion by REST and at the command line: finished work with its files; other work is refused with a reason."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.api.cli.test_chaos_cli import RUNS
from tests.api.cli.test_cli import JOB, error, play, step
from tests.api.conftest import wait_until
from tests.databases import writing

from share_compute.errors import Conflict, MissingScope, NotFound, NotOwner
from share_compute.lifecycle.attempt_events import ArtifactSaved, AttemptEnded
from share_compute.lifecycle.states import JobState
from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.store import Store
from share_compute_api.client.client import Client
from share_compute_api.server.retention import cleaner

Run = Callable[..., "subprocess.CompletedProcess[str]"]
DONE = AttemptEnded(outcome="succeeded", reason="done")


def folder_of(plane: Any, job_id: str) -> Path:
    """Return a job's folder, with a checkpoint and an artifact in it."""
    folder: Path = plane.settings.data_folder / "jobs" / job_id
    for name in ("checkpoints/step-00000001", "artifacts/model"):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").write_bytes(b"12345678")
    return folder


def saved(folder: Path) -> ArtifactSaved:
    return ArtifactSaved(name="model", path=folder / "artifacts/model", size_bytes=8)


@pytest.mark.slow
def test_a_job_goes_with_its_files(client: Client, plane: Any) -> None:
    job = client.submit(JOB.format(name="old"))
    folder = folder_of(plane, job.id)
    with pytest.raises(Conflict, match="is queued; only jobs that are over"):
        client.delete_job(job.id)
    play(plane, job.id, RUNS, step(1), saved(folder), DONE)
    assert client.delete_job(job.id).is_deleted
    for gone in (client.job, client.artifacts, client.metrics, client.delete_job):
        with pytest.raises(NotFound):
            gone(job.id)
    wait_until(lambda: not folder.exists())
    assert folder.parent.is_dir()


@pytest.mark.slow
def test_a_running_job_is_cancelled_then_deleted(client: Client, plane: Any, http: Any) -> None:
    job = client.submit(JOB.format(name="runs"))
    play(plane, job.id, RUNS, step(1))
    answer = http.delete(f"/jobs/{job.id}", params={"cancel": True})
    assert (answer.status_code, answer.json()) == (202, {"id": job.id, "is_deleted": False})
    assert client.job(job.id).cancel_requested_at is not None
    plane.store.progress.record(job.id, 1, [AttemptEnded(outcome="cancelled", reason="on request")])

    def is_gone() -> bool:
        return http.get(f"/jobs/{job.id}").status_code == 404

    wait_until(is_gone)


@pytest.mark.slow
def test_an_artifact_goes_alone(client: Client, plane: Any) -> None:
    job = client.submit(JOB.format(name="kept"))
    folder = folder_of(plane, job.id)
    play(plane, job.id, RUNS, step(1), saved(folder), DONE)
    assert client.delete_artifact(job.id, "model").id == f"{job.id}/model"
    with pytest.raises(NotFound):
        client.delete_artifact(job.id, "model")
    wait_until(lambda: not (folder / "artifacts/model").exists())
    assert (folder / "checkpoints/step-00000001/weights").exists()
    assert client.job(job.id).state is JobState.succeeded


def test_files_that_a_crash_left_are_removed_at_the_next_start(client: Client, plane: Any) -> None:
    job = client.submit(JOB.format(name="old"))
    folder = folder_of(plane, job.id)

    def crash() -> None:
        # The row is deleted, and no process removes the files.
        plane.store.deletions.job(job.id, plane.settings.data_folder.resolve(), cancel=True)
        assert folder.is_dir()

    plane.restart(crash)
    wait_until(lambda: not folder.exists())
    wait_until(lambda: not plane.store.deletions.folders())


def test_nothing_outside_the_folder_of_jobs_is_removed(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    from share_compute.store.deletion import remove_folder

    outside = tmp_path / "outside"
    outside.mkdir()
    jobs = settings.data_folder / "jobs"
    (jobs / "job-link").mkdir(parents=True)
    (jobs / "job-link" / "artifacts").symlink_to(outside)
    (outside / "model").mkdir()
    whole = jobs / "job-whole"
    (whole / "inner").mkdir(parents=True)
    (whole / "inner" / "link").symlink_to(outside)
    (jobs / "output.jsonl").touch()
    with writing(store) as session:
        for folder in (
            outside,
            jobs,
            jobs / ".." / "uploads",
            jobs / "job-link" / "artifacts" / "model",
            whole,
        ):
            remove_folder(session, folder, store.clock())
    cleaner(settings, store).delete_due()
    assert (outside / "model").is_dir()
    assert jobs.is_dir()
    assert not whole.exists()
    assert store.deletions.folders() == [jobs / "job-link" / "artifacts" / "model"]


def test_the_command_asks_before_it_deletes(client: Client, plane: Any, run: Run) -> None:
    first, second = (client.submit(JOB.format(name=name)) for name in ("one", "two"))
    refused = run("delete", first.id, "--yes", "--json")
    assert refused.returncode == 4
    assert error(refused)["detail"] == f"job {first.id} is queued; nothing was deleted"
    play(plane, first.id, RUNS, DONE)
    result = run("delete", first.id)
    assert result.returncode == 2
    assert "pass --yes" in result.stderr
    assert client.job(first.id)
    done = run("delete", first.id, second.id, "--cancel", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["items"] == [
        {"id": first.id, "is_deleted": True},
        {"id": second.id, "is_deleted": True},
    ]
    assert client.jobs().jobs == []


@pytest.mark.slow
def test_pruning_lists_what_would_go_then_deletes_it(settings: Settings, plane: Any, run: Run) -> None:
    with Client(plane.url, plane.api_key) as client:
        job = client.submit(JOB.format(name="old"))
        folder = folder_of(plane, job.id)
        play(plane, job.id, RUNS, step(1), saved(folder), DONE)
        nothing = run("prune", "--dry-run", "--json")
        assert json.loads(nothing.stdout) == {"items": [], "dry_run": True, "size_bytes": 0, "keep": {}}
        assert "SHARE_COMPUTE_KEEP_JOBS_DAYS" in run("prune").stdout
    # The client's requests see this setting. The server's own loop keeps everything, since it could prune first.
    plane.app.state.context.settings = settings.model_copy(update={"keep_jobs_days": 0.0})
    listed = run("prune", "--dry-run", "--json")
    assert listed.returncode == 0, listed.stderr
    report = json.loads(listed.stdout)
    assert report["dry_run"]
    assert report["keep"] == {"keep_jobs_days": 0.0}
    assert [(one["kind"], one["job_id"], one["size_bytes"]) for one in report["items"]] == [
        ("job", job.id, 16)
    ]
    assert report["size_bytes"] == 16
    assert folder.is_dir()
    table = run("prune", "--dry-run")
    assert job.id in table.stdout
    assert "16 bytes of files would be deleted" in table.stdout or "16 B of files would be" in table.stdout
    done = run("prune", "--yes", "--json")
    assert json.loads(done.stdout)["items"] == report["items"]
    assert not folder.exists()
    with Client(plane.url, plane.api_key) as client, pytest.raises(NotFound):
        client.job(job.id)


def test_only_the_key_that_made_a_job_and_admins_delete_it(client: Client, plane: Any) -> None:
    job = client.submit(JOB.format(name="old"))
    folder = folder_of(plane, job.id)
    play(plane, job.id, RUNS, step(1), saved(folder), DONE)
    _, other_key = plane.store.keys.create("other", [Scope.submit])
    with Client(plane.url, other_key) as other:
        with pytest.raises(NotOwner):
            other.delete_job(job.id)
        with pytest.raises(NotFound):
            other.delete_artifact(job.id, "model")
        with pytest.raises(MissingScope):
            other.prune(dry_run=True)
    assert client.artifacts(job.id)
    assert client.delete_job(job.id).is_deleted


def test_a_server_prunes_by_itself(settings: Settings, client: Client, plane: Any) -> None:
    over, waits = client.submit(JOB.format(name="over")), client.submit(JOB.format(name="waits"))
    folder = folder_of(plane, over.id)
    play(plane, over.id, RUNS, DONE)
    plane.settings = settings.model_copy(update={"keep_jobs_days": 0.0})
    plane.restart()
    wait_until(lambda: not folder.exists())
    assert [job.id for job in client.jobs().jobs] == [waits.id]


@pytest.mark.slow
def test_backup_and_restore_at_the_command_line(tmp_path: Path, plane: Any, run: Run) -> None:
    folder = str(plane.settings.data_folder)
    made = run("backup", "--data-folder", folder, "--json")
    assert made.returncode == 0, made.stderr
    backup = json.loads(made.stdout)["path"]
    assert Path(backup).parent == plane.settings.data_folder / "backups"
    result = run("restore", backup, "--data-folder", folder, "--json")
    assert (result.returncode, error(result)["hint"]) == (2, "to confirm, pass --yes")
    plane.store.hold()
    refused = run("restore", backup, "--data-folder", folder, "--yes", "--json")
    assert refused.returncode == 4
    assert "another server uses the database" in error(refused)["detail"]
    elsewhere = str(tmp_path / "restored")
    done = run("restore", backup, "--data-folder", elsewhere, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    restored = json.loads(done.stdout)
    assert restored == {"path": str(tmp_path / "restored" / "share-compute.db"), "replaced": None}
    other = run("backup", "--database-url", "postgresql+psycopg://ada@host/name", "--json")
    assert other.returncode == 2
    assert "pg_dump" in error(other)["hint"]
