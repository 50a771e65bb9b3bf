"""The command line as scripts and people use it: real processes against a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.api.playing import Cluster
from typer.testing import CliRunner

from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    AttemptEvent,
    Planned,
    StepCommitted,
    Validated,
)
from share_compute.lifecycle.states import JobState
from share_compute.planning.plan import Plan
from share_compute.scopes import GRANTABLE, Scope
from share_compute.specification import ServeJob, job_schema
from share_compute_api.cli import make_app
from share_compute_api.control.patience import Patience
from share_compute_api.schemas.agents import MachineLimits
from share_compute_api.schemas.bodies import UploadRequest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

JOB = """
name: {name}
model:
  layers: [{{type: linear, options: {{in_features: 64, out_features: 10}}}}]
data: {{dataset: digits}}
training: {{steps: 2}}
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(name="digits"))
    return path


def play(plane: Any, job_id: str, *events: AttemptEvent) -> None:
    plane.store.jobs.begin(job_id, [])
    plane.store.progress.record(job_id, plane.store.jobs.get(job_id).attempt, events)


def play_end(plane: Any, job_id: str) -> None:
    attempt = plane.store.jobs.get(job_id).attempt
    plane.store.progress.record(job_id, attempt, [AttemptEnded(outcome="succeeded", reason="done")])


def step(number: int) -> StepCommitted:
    return StepCommitted(
        step=number,
        loss=2.0 / number,
        learning_rate=0.1,
        gradient_norm=1.0,
        samples=16,
        tokens=16,
        seconds=0.5,
        tokens_per_s=32.0,
    )


def error(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stderr)["error"]
    assert document["hint"]
    return document


def test_a_jobs_life_from_the_terminal(plane: Any, run: Run, job_file: Path, tmp_path: Path) -> None:
    submitted = run("submit", str(job_file), "--json")
    assert submitted.returncode == 0, submitted.stderr
    job_id = json.loads(submitted.stdout)["id"]
    table = run("jobs")
    assert job_id in table.stdout
    assert "queued" in table.stdout
    result = plane.settings.data_folder / "jobs" / job_id / "artifacts" / "model"
    result.mkdir(parents=True)
    (result / "model.safetensors").write_bytes(b"weights")
    saved = ArtifactSaved(name="model", path=result, size_bytes=7)
    plan = Plan(epoch=0, strategy="uniform", num_layers=1, parameters=650, stages=(), microbatches=1)
    play(
        plane,
        job_id,
        Planned(plan=plan),
        step(1),
        step(2),
        Validated(split="validation", step=2, loss=1.5, accuracy=0.75),
        Validated(split="test", step=2, loss=1.625),
        saved,
        AttemptEnded(outcome="succeeded", reason="2 steps done"),
    )
    shown = run("show", job_id)
    assert "2 of 2" in shown.stdout
    assert "succeeded" in shown.stdout
    assert "validation  loss 1.5, accuracy 0.75\ntest        loss 1.625\n" in shown.stdout
    assert f"next        get the result: share-compute artifacts get {job_id}\n" in shown.stdout
    assert json.loads(run("show", job_id, "--json").stdout)["results"]["test_loss"] == 1.625
    lines = [json.loads(line) for line in run("logs", job_id, "--json").stdout.splitlines()]
    assert [line["kind"] for line in lines][-5:] == ["validated", "validated", "artifact", "ended", "state"]
    followed = run("logs", "-f", job_id)
    assert followed.returncode == 0
    assert "step 2  loss 1.0000" in followed.stdout
    assert run("metrics", job_id, "--format", "csv").stdout.startswith("step,split,loss,")
    assert len(json.loads(run("metrics", job_id, "--json").stdout)["items"]) == 4
    assert "model" in run("artifacts", "list", job_id).stdout
    fetched = run("artifacts", "get", job_id, "--output", str(tmp_path / "out"))
    assert fetched.returncode == 0, fetched.stderr
    assert (tmp_path / "out" / "model" / "model.safetensors").read_bytes() == b"weights"
    again = run("artifacts", "get", job_id, "--output", str(tmp_path / "out"), "--json")
    assert (again.returncode, error(again)["code"]) == (4, "conflict")


@pytest.mark.slow
def test_logs_can_be_cut_to_the_last_events(plane: Any, run: Run, job_file: Path) -> None:
    job_id = json.loads(run("submit", str(job_file), "--json").stdout)["id"]
    play(plane, job_id)
    plane.store.jobs.move(job_id, JobState.running, "running", attempt=1)
    plane.store.progress.record(job_id, 1, [*map(step, range(1, 7))])

    def kept(*options: str) -> list[int]:
        lines = map(json.loads, run("logs", job_id, "--json", *options).stdout.splitlines())
        return [line["data"]["step"] for line in lines if line["kind"] == "step"]

    assert kept() == kept("--since", "1h") == kept("--tail", "100") == [1, 2, 3, 4, 5, 6]
    assert kept("--tail", "2") == kept("--tail", "2", "--since", "1h") == [5, 6]
    assert kept("--tail", "0") == kept("--since", "0s") == []
    is_over = threading.Event()
    numbers = count(7)

    def report() -> None:
        while not is_over.wait(0.005):
            plane.store.progress.record(job_id, 1, [step(next(numbers))])

    reporter = threading.Thread(target=report)
    reporter.start()
    lines = run("logs", job_id, "--tail", "3").stdout.splitlines()
    is_over.set()
    reporter.join()
    assert len(lines) == 3, "events that come meanwhile are not printed"
    refused = run("logs", job_id, "--since", "soon", "--json")
    assert (refused.returncode, error(refused)["code"]) == (2, "invalid-request")
    play_end(plane, job_id)
    assert kept("--tail", "2", "--follow") == []
    assert kept("--tail", "3", "--follow") == [next(numbers) - 1]


@pytest.mark.slow
def test_the_status_says_why_each_job_waits(run: Run, job_file: Path) -> None:
    job_id = json.loads(run("submit", str(job_file), "--json").stdout)["id"]
    document = json.loads(run("status", "--json").stdout)
    (waiting,) = document["queue"]
    assert waiting["id"] == job_id
    table = run("status").stdout
    assert re.search(
        rf"^waits +name +since +reason *\n{job_id} .* {re.escape(waiting['reason'])}", table, re.M
    )


@pytest.mark.slow
def test_the_exit_code_tells_how_a_followed_job_ended(plane: Any, run: Run, job_file: Path) -> None:
    job_id = json.loads(run("submit", str(job_file), "--json").stdout)["id"]
    lost = AttemptEnded(
        outcome="failed", reason="ada was lost", error={"code": "contributor-lost", "hint": "resume it"}
    )
    play(plane, job_id, step(1), lost)
    failed = run("logs", "-f", job_id)
    assert failed.returncode == 10
    assert "ada was lost" in failed.stdout
    assert "resume it" in failed.stdout
    assert run("resume", job_id).returncode == 0
    assert run("cancel", job_id).returncode == 0
    assert run("logs", "-f", job_id, "--json").returncode == 11


@pytest.mark.slow
def test_a_job_comes_from_standard_input_and_paths_from_its_folder(run: Run, tmp_path: Path) -> None:
    assert run("submit", "-", text=JOB.format(name="piped")).returncode == 0
    (tmp_path / "corpus.txt").write_text("text")
    job = {"model": {"config": {"model_type": "llama", "vocab_size": 300}}, "data": {"files": ["corpus.txt"]}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = run("submit", str(tmp_path / "job.json"), "--json")
    assert json.loads(done.stdout)["spec"]["data"]["files"] == [str(tmp_path / "corpus.txt")]


@pytest.mark.slow
def test_errors_are_one_line_a_hint_and_an_exit_code(run: Run, tmp_path: Path) -> None:
    missing = run("show", "job-none")
    assert missing.returncode == 3
    assert missing.stdout == ""
    assert missing.stderr.splitlines()[0] == "error: there is no job job-none"
    assert "share-compute jobs" in missing.stderr
    (tmp_path / "bad.yaml").write_text("model: {layers: []}\noptimiser: adam")
    bad = run("submit", str(tmp_path / "bad.yaml"), "--json")
    assert (bad.returncode, error(bad)["code"]) == (2, "invalid-request")
    assert run("submit", str(tmp_path / "none.yaml")).returncode == 2
    refused = run("jobs", "--json", SHARE_COMPUTE_API_KEY="sck_wrong")
    assert (refused.returncode, error(refused)["code"]) == (5, "not-authorized")
    away = run("jobs", "--json", SHARE_COMPUTE_URL="http://127.0.0.1:1")
    assert (away.returncode, error(away)["code"]) == (8, "unavailable")


@pytest.mark.slow
def test_invites_are_made_listed_and_revoked(run: Run) -> None:
    plain = run("invite", "--label", "Ada")
    assert "share-compute join http://127.0.0.1:" in plain.stdout, plain.stderr
    assert "make setup" in plain.stdout
    assert "service install" in plain.stdout
    made = json.loads(run("invite", "create", "--json").stdout)
    assert {one["state"] for one in json.loads(run("invite", "list", "--json").stdout)["items"]} == {"open"}
    assert json.loads(run("invite", "revoke", made["id"], "--json").stdout)["state"] == "revoked"
    assert "No machine joined yet" in run("contributors").stdout


def test_machines_are_listed_with_their_work_and_their_labels(plane: Any, run: Run, tmp_path: Path) -> None:
    cluster = Cluster(plane.store, tmp_path, Patience())
    serving = cluster.contributor("ada", site="north pole", gpu="no")
    spec = ServeJob.model_validate({"name": "llama", "model": {"path": str(tmp_path)}})
    deployment = plane.store.deployments.create(spec, reason="new")
    assert plane.store.leases.take(deployment.id, [serving])
    listed = run("contributors", COLUMNS="200").stdout
    assert "serves llama" in listed
    assert "gpu=no, site=north pole" in listed
    (machine,) = json.loads(run("contributors", "--json").stdout)["items"]
    assert machine["limits"]["labels"] == {"site": "north pole", "gpu": "no"}
    assert "is not in quarantine: there was nothing to clear" in run("clear", machine["name"]).stdout


@pytest.mark.slow
def test_an_invite_of_several_uses_is_made_by_command(run: Run) -> None:
    plain = run("invite", "--uses", "10", "--expires", "7d", "--label", "class")
    assert re.search(r"10 machines can join with this, in (7 d|6 d 23 h)", plain.stdout), plain.stderr
    code = run("invite", "--code-only", "--uses", "2", "--memory", "4GiB", "--expires", "30m").stdout
    assert re.fullmatch(r"[a-z0-9]{4}(-[a-z0-9]{4})+\n", code)
    found = {one["label"]: one for one in json.loads(run("invite", "list", "--json").stdout)["items"]}
    assert (found["class"]["uses"], found["class"]["memory_bytes"]) == (10, None)
    assert (found[None]["uses"], found[None]["memory_bytes"]) == (2, 4 * 2**30)
    assert "0 of 10" in run("invite", "list").stdout
    refused = run("invite", "--expires", "soon")
    assert (refused.returncode, "7d" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_a_repeated_command_has_the_exit_code_of_the_first(run: Run, job_file: Path) -> None:
    job_id = json.loads(run("submit", str(job_file), "--json").stdout)["id"]
    invite = json.loads(run("invite", "create", "--json").stdout)["id"]
    key = json.loads(run("keys", "create", "Ada", "--json").stdout)["id"]
    for words in (("cancel", job_id), ("invite", "revoke", invite), ("keys", "revoke", key)):
        assert [run(*words).returncode for _ in range(2)] == [0, 0], words
    assert run("delete", job_id, "--yes").returncode == 0
    assert run("delete", job_id, "--yes").returncode == 3


@pytest.mark.slow
def test_keys_are_made_listed_and_revoked(run: Run) -> None:
    chat = json.loads(run("keys", "create", "Ada's chats", "--json").stdout)
    assert chat["scopes"] == ["chat"]
    refused = run("contributors", SHARE_COMPUTE_API_KEY=chat["key"])
    assert (refused.returncode, "needs the scope read" in refused.stderr) == (5, True)
    made = json.loads(run("keys", "create", "Ada's scripts", "--scope", "read", "--json").stdout)
    assert run("contributors", SHARE_COMPUTE_API_KEY=made["key"]).returncode == 0
    listed = run("keys", "list").stdout
    assert made["id"] in listed
    assert "admin" in listed
    assert made["export_command"].endswith(f" SHARE_COMPUTE_API_KEY={made['key']}")
    assert json.loads(run("keys", "revoke", "Ada's scripts", "--json").stdout)["revoked_at"] is not None
    refused = run("contributors", SHARE_COMPUTE_API_KEY=made["key"])
    assert (refused.returncode, "not valid" in refused.stderr) == (5, True)


@pytest.mark.slow
def test_the_key_in_use_is_revoked_only_after_a_question(plane: Any, run: Run) -> None:
    _, key = plane.store.keys.create("second", [Scope.admin])
    own = json.loads(run("keys", "list", "--json", SHARE_COMPUTE_API_KEY=key).stdout)["items"][-1]["id"]
    result = run("keys", "revoke", own, "--json", SHARE_COMPUTE_API_KEY=key)
    assert (result.returncode, "--yes" in error(result)["hint"]) == (2, True)
    assert plane.store.keys.verify(key) is not None
    assert run("keys", "revoke", own, "--yes", SHARE_COMPUTE_API_KEY=key).returncode == 0
    assert plane.store.keys.verify(key) is None


@pytest.mark.parametrize(
    ("words", "option", "known"),
    [
        (["serve"], "dtype", job_schema("serve")["properties"]["dtype"]["enum"]),
        (["serve"], "objective", job_schema("serve")["properties"]["objective"]["enum"]),
        (["join"], "device", MachineLimits.model_json_schema()["properties"]["device"]["enum"]),
        (["upload"], "kind", UploadRequest.model_json_schema()["properties"]["kind"]["enum"]),
        (["keys", "create"], "scope", list(GRANTABLE)),
    ],
)
def test_options_offer_what_the_schema_allows(words: list[str], option: str, known: list[str]) -> None:
    output = CliRunner().invoke(make_app(), [*words, "--help"], env={"COLUMNS": "300"}).output
    (line,) = (line for line in output.splitlines() if f"--{option} " in line)
    assert all(re.search(rf"\b{name}\b", line) for name in known)


@pytest.mark.parametrize("words", [(), ("keys",)])
def test_a_command_without_arguments_shows_its_help_and_no_error(run: Run, words: tuple[str, ...]) -> None:
    shown = run(*words)
    assert shown.returncode == 2
    assert "Usage: share-compute" in shown.stdout + shown.stderr
    assert "error:" not in shown.stderr


def test_help_does_not_keep_the_line_breaks_of_the_source() -> None:
    output = CliRunner().invoke(make_app(), ["join", "--help"], env={"COLUMNS": "400"}).output
    assert "`share-compute service install` joins at each boot. Ctrl-C drains the machine" in output


@pytest.mark.slow
def test_every_setting_is_shown_with_its_origin(run: Run) -> None:
    listed = run("config", "--json", SHARE_COMPUTE_DATABASE_URL="postgresql://u:secret@h/n").stdout
    shown = {one["name"]: one for one in json.loads(listed)["items"]}
    assert (shown["port"]["origin"], shown["url"]["origin"]) == ("default", "environment")
    assert "secret" not in json.dumps(shown)
    assert all(one["description"] for name, one in shown.items() if name != "log_level")
    table = run("config").stdout
    assert "[]" not in table
    assert "Options of a running `share-compute up` are not included." in table
    assert all(one["variable"] in table for one in shown.values())
    assert len(table.splitlines()) <= len(shown) + 10  # a long path continues on the next lines
    described = run("config", "SHARE_COMPUTE_PORT").stdout
    assert "0 picks a" in described
    assert "SHARE_COMPUTE_PORT" in described
    assert run("config", "nothing").returncode == 3


def test_help_is_quick_to_load_and_lists_the_exit_codes(run: Run) -> None:
    helped = run("--help")
    assert "Exit codes" in helped.stdout
    program = (
        "import sys, share_compute_api.cli;"
        "slow = ('torch', 'ray', 'fastapi', 'sqlalchemy', 'httpx', 'share_compute.specification');"
        "print([name for name in slow if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_job_ids_are_completed(run: Run, job_file: Path) -> None:
    job_id = json.loads(run("submit", str(job_file), "--json").stdout)["id"]
    # Bash runs the program with these variables when the tab key is pressed.
    completed = run(
        _SHARE_COMPUTE_COMPLETE="complete_bash", COMP_WORDS="share-compute show job-", COMP_CWORD="2"
    )
    assert job_id in completed.stdout, completed.stderr
