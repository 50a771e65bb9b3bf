"""Every table of the command line in terminals of 60 to 200 columns, with long names, and as JSON for scripts."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from tests.api.conftest import Plane
from tests.api.control.test_sweeps import begin, trials, validate
from tests.api.playing import Cluster
from tests.api.routes import test_layout
from tests.api.routes.test_catalogue import settled
from tests.api.routes.test_deployments import Supervised, whole
from tests.api.routes.test_job_rounds import ROUNDS, merge
from tests.api.routes.test_labels import trained
from typer.core import TyperGroup
from typer.testing import CliRunner

import share_compute_api
from share_compute.lifecycle.attempt_events import ArtifactSaved, Planned
from share_compute_actors.machine.preflight import CheckResult
from share_compute_api.cli import make_app
from share_compute_api.client.client import Client
from share_compute_api.control.patience import Patience
from share_compute_api.terminal import output
from share_compute_api.terminal.tables import WholeTable

ROOT = Path(__file__).parents[3]
LAN = str(ROOT / "examples" / "topologies" / "lan.yaml")
TINY = str(ROOT / "examples" / "tiny-llama.yaml")
WIDTHS = (60, 80, 120, 200)
WHOLE = re.compile(r"(?:con|dep|inv|job|key|upl)-[a-z0-9]{8}\b|\b\d+\.\d+\b|\b\d{4,}\b|\b\d+(?:,\d{3})+\b")
"""Ids, numbers with decimals, and numbers of four or more digits."""
PLANNING = (["plan", TINY, "--topology", LAN, "--compare"], ["plan", TINY, "--topology", LAN, "--operators"])
__all__ = ["whole"]

NO_JSON = {"chat", "schema"}
"""Commands that print no data, or nothing but JSON."""

Invoke = Callable[..., Any]


@pytest.fixture
def invoke(plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command in this process, in a terminal of some columns."""
    environment = {
        "SHARE_COMPUTE_URL": plane.url,
        "SHARE_COMPUTE_API_KEY": plane.api_key,
        "SHARE_COMPUTE_DATA_FOLDER": str(tmp_path / "elsewhere"),
    }

    def run(words: Sequence[str], columns: int = 80) -> Any:
        monkeypatch.setattr(output.console, "width", columns)
        done = CliRunner().invoke(make_app(), [*words], env={**environment, "COLUMNS": str(columns)})
        assert done.exit_code == 0, (words, done.output, done.exception)
        return done

    return run


@pytest.fixture
def listings(
    plane: Plane, client: Client, digits: dict[str, Any], tmp_path: Path, whole: Path
) -> list[list[str]]:
    """Fill a server with long names and large numbers; return the commands that list them."""
    cluster = Cluster(plane.store, tmp_path, Patience())
    for number in range(3):
        cluster.contributor(f"workstation-{number}.physics.example.org", site="building seven", gpu="no")
    jobs = [
        trained(plane, client, {**digits, "name": f"digits of a long experiment {number}"}, loss)
        for number, loss in enumerate((0.000123456, 123456.789))
    ]
    training = {"steps": 8, "synchronization": ROUNDS}
    rounds = client.submit({**digits, "training": training}).id
    plane.store.jobs.begin(rounds, [])
    plane.store.progress.record(rounds, 1, [merge(1), merge(2), merge(3, missing=[1])])
    folder = plane.settings.data_folder / "jobs" / rounds / "artifacts" / "model"
    folder.mkdir(parents=True)
    saved = ArtifactSaved(name="model-of-a-long-experiment", path=folder, size_bytes=123456789)
    plane.store.progress.record(rounds, 1, [saved])
    test_layout.write(folder, test_layout.FILES)
    plane.store.progress.record(rounds, 1, [Planned(plan=test_layout.PLAN)])
    rates = {"training.optimizer.learning_rate": {"values": [0.000125, 0.0125]}}
    sweep = client.submit(
        {
            "kind": "sweep",
            "job": {**digits, "training": {"steps": 20, "validate_every": 5}},
            "fields": rates,
            "jobs_at_once": 2,
        }
    )
    trial = trials(plane, sweep, 2)[0]
    begin(plane, trial)
    validate(plane, trial, 5, 0.123456)
    text = tmp_path / "corpus of a long experiment.txt"
    text.write_text("a line\n" * 1000)
    client.upload(text, name=text.name)
    client.create_invite("The physics department, for its summer school", 3600.0, uses=9999)
    client.create_key("Ada's notebook in the physics department")
    model = {"path": str(shutil.copytree(whole, tmp_path / "whole"))}
    client.deploy({"name": "llama-of-a-long-experiment", "model": model, "replicas": "0..4"})
    plane.app.state.context.deployments = Supervised()
    named = f"{{name: A model of the physics department, model: {model}, description: It writes, licence: apache-2.0}}"
    (plane.settings.data_folder / "catalogue.yaml").write_text(f"models: [{named}]")
    settled(client)
    measured = tmp_path / "table of a long experiment.csv"
    measured.write_text("width of the petals,kind\n20261129.125,Iris setosa\n0.000123456,Iris versicolor\n")
    layers = [{"type": "linear", "options": {"in_features": 1, "out_features": 2}}]
    data = {"files": [str(measured)], "table": {"target": "kind"}}
    table = tmp_path / "table.json"
    table.write_text(
        json.dumps({"task": "tabular_classification", "model": {"layers": layers}, "data": data})
    )
    return [
        ["contributors"], ["contributors", "--links"], ["status"], ["jobs"], ["show", jobs[1]], ["show", sweep.id],
        ["show", rounds], ["metrics", jobs[1]], ["compare", *jobs, sweep.id], ["invite", "list"],
        ["keys", "list"], ["uploads", "list"], ["artifacts", "list", rounds],
        ["artifacts", "layout", rounds, saved.name], ["artifacts", "layout", rounds, saved.name, "--weights"],
        ["models"], ["preview-data", str(table)], ["deployments"],
        ["deployments", "llama-of-a-long-experiment"], ["prune", "--dry-run"], ["config"], ["config", "keep"],
    ]  # fmt: skip


def require_fit(text: str, columns: int, words: Sequence[str]) -> None:
    for line in text.splitlines():
        # Only a word that is longer than the terminal is wide makes a longer line.
        assert len(line.rstrip()) <= columns or len(line.split()[-1]) > columns - 30, (words, columns, line)


@pytest.mark.slow
def test_ids_and_numbers_are_whole_at_any_width(listings: list[list[str]], invoke: Invoke) -> None:
    for words in listings:
        widest = {*WHOLE.findall(invoke(words, 1000).stdout)}
        for columns in WIDTHS:
            text = invoke(words, columns).stdout
            assert widest <= {*WHOLE.findall(text)}, (words, columns, text)
            require_fit(text, columns, words)


def test_the_findings_of_doctor_fit(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        CheckResult("versions", "ok", "Python 3.11.15, share-compute 0.2.0, ray 2.60.0, torch 2.13.0"),
        CheckResult("disk", "warn", f"{'/a/long/folder' * 5} has 1.25 GiB free", "free 3.75 GiB; " * 6),
    ]
    monkeypatch.setattr("share_compute_api.agent.examination.examine", lambda *_: iter(found))
    for columns in WIDTHS:
        text = invoke(["doctor"], columns).stdout
        assert {"3.11", "2.60", "2.13", "1.25", "3.75"} <= {*re.findall(r"\d+\.\d+", text)}
        require_fit(text, columns, ["doctor"])


@pytest.mark.slow
def test_plans_and_simulations_fit(invoke: Invoke) -> None:
    simulation = ["simulate", TINY, "--topology", LAN, "--hours", "1"]
    for words in (*PLANNING, simulation):
        for columns in WIDTHS:
            require_fit(invoke(words, columns).stdout, columns, words)


def test_any_row_is_whole_at_any_width() -> None:
    names = ("id", "name", "loss", "sent", "", "reason")
    rows = [
        ("job-k3v7q2ma", "llama-7b", "123456.789", "1.5 GiB", "this plan", "all steps are done, and stored"),
        ("job-a2b3c4d5", None, "0.000123", None, "", "no machine is free: " * 8),
    ]
    for count in range(1, len(names) + 1):
        wanted = {word for row in rows for cell in row[:count] for word in (cell or "").split()}
        for columns in (20, 40, *WIDTHS):
            console = Console(width=columns, file=io.StringIO(), force_terminal=True, no_color=True)
            cells = (row[:count] for row in rows)
            with console.capture() as capture:
                console.print(WholeTable(names[:count], cells, right=("loss", "sent")), crop=False)
            text = re.sub(r"\x1b\[\d*m", "", capture.get())
            assert wanted <= {*text.split()}
            assert all(len(line) <= columns for line in text.splitlines())


def test_all_tables_are_of_one_kind() -> None:
    """No module makes a table that cuts its cells; the status of `join` is no table of rows."""
    folder = Path(share_compute_api.__file__).parent
    others = {
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*.py")
        if "from rich.table import" in file.read_text()
    }
    assert others == {"terminal/tables.py", "cli/contributor/showing.py"}


def commands(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the command of all commands below one."""
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            yield from commands(child, *path, name)
    else:
        yield " ".join(path), command


def test_every_command_prints_json_and_the_documentation_lists_it() -> None:
    found = dict(commands(typer.main.get_command(make_app())))
    assert len(found) > 40
    assert {
        path
        for path, command in found.items()
        if not any("--json" in parameter.opts for parameter in command.params)
    } == NO_JSON
    text = (ROOT / "docs" / "command-line.md").read_text()
    documented = set(re.findall(r"^\| `([a-z -]+)`", text, re.MULTILINE))
    assert documented == set(found) - NO_JSON


def test_lists_have_one_form(listings: list[list[str]], invoke: Invoke) -> None:
    single = ("show", "compare", "status", "preview-data")
    for words in listings:
        if words[0] in single or words == ["deployments", "llama-of-a-long-experiment"]:
            continue
        document = json.loads(invoke([*words, "--json"]).stdout)
        assert isinstance(document["items"], list), words
        if words != ["prune", "--dry-run"]:
            assert document["items"], words
