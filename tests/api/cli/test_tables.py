"""Tables in terminals of any width: ids and numbers are whole, also where a table does not fit."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.api.conftest import Plane
from tests.api.control.test_sweeps import begin, trials, validate
from tests.api.routes.test_labels import trained

from share_compute_api.client.client import Client
from share_compute_api.terminal import output

NAMES = ("id", "state", "validation loss", "reason")
ROWS = [
    ("job-k3v7q2ma", "[green]succeeded[/]", "0.1234", "all 200 steps are done, and the result is stored"),
    ("job-a2b3c4d5", "queued", None, "no machine is free"),
]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Print a table in a terminal of some columns, or into a pipe; return the lines."""

    def show(columns: int | None, names: Sequence[str] = NAMES, rows: Sequence[Any] = ROWS) -> list[str]:
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        console = output.Terminal()
        console.file = io.StringIO()
        monkeypatch.setattr(output, "console", console)
        output.print_table(names, rows, empty="nothing")
        return console.file.getvalue().splitlines()

    return show


def test_prose_wraps_in_a_table_that_fits(printed: Callable[..., list[str]]) -> None:
    lines = printed(70)
    assert lines[0].split() == ["id", "state", "validation", "loss", "reason"]
    assert len(lines) > 3
    assert max(map(len, lines)) <= 70


def test_a_row_that_does_not_fit_is_a_paragraph(printed: Callable[..., list[str]]) -> None:
    text = printed(20)
    assert text[0].startswith("job-k3v7q2ma")
    together = " ".join(" ".join(text).split())
    for row in ROWS:
        assert f"{row[0]} state" in together
    assert "validation loss 0.1234 reason all 200 steps are done, and the result is stored" in together


@pytest.mark.parametrize("columns", [40, 60])
def test_columns_that_do_not_fit_follow_below_each_row(
    printed: Callable[..., list[str]], columns: int
) -> None:
    text = printed(columns)
    assert text[0].split() == ["id", "state", "validation", "loss"]
    assert text[1].startswith("job-k3v7q2ma")
    together = " ".join(" ".join(text).split())
    assert "reason all 200 steps are done, and the result is stored" in together


def test_a_number_at_the_beginning_has_its_name(printed: Callable[..., list[str]]) -> None:
    rows = [("3 *", "job-k3v7q2ma", "0.1234")]
    assert printed(20, ("trial", "job", "loss"), rows) == ["trial 3 *", "  job job-k3v7q2ma", "  loss 0.1234"]


def test_into_a_pipe_each_row_is_a_line(printed: Callable[..., list[str]]) -> None:
    lines = printed(None)
    assert len(lines) == 1 + len(ROWS)
    assert lines[0] == "id            state      validation loss  reason"
    assert lines[2] == "job-a2b3c4d5  queued     -                no machine is free"
    assert printed(None, rows=[]) == ["nothing"]


@pytest.mark.parametrize("columns", [None, 40, 200])
def test_a_line_break_in_a_cell_is_a_space(printed: Callable[..., list[str]], columns: int | None) -> None:
    lines = printed(columns, ("id", "na\nme"), [("job-a2b3c4d5", "two\nlines"), ("job-k3v7q2ma", "one")])
    assert [" ".join(line.split()) for line in lines] == [
        "id na me",
        "job-a2b3c4d5 two lines",
        "job-k3v7q2ma one",
    ]


def test_whole_parts_of_numbers_are_whole() -> None:
    numbers = (None, 0.000123456, 12.3456, 51234.5, -123456.7, 9999.7, float("inf"), 1e20)
    assert [*map(output.number, numbers)] == [
        None, "0.0001235", "12.35", "51234", "-123457", "10000", "inf", "1e+20",
    ]  # fmt: skip


@pytest.mark.slow
def test_jobs_are_compared_in_any_terminal(
    plane: Plane, client: Client, digits: dict[str, Any], run: Any
) -> None:
    jobs = [
        trained(plane, client, {**digits, "name": f"digits with a long name {place}"}, 0.123456 / (place + 1))
        for place in range(4)
    ]
    changed = {**digits, "training": {"steps": 3, "optimizer": {"learning_rate": 0.000125}}}
    jobs.append(trained(plane, client, changed, 12345.678))
    for columns in ("30", "80", "200"):
        words = run("compare", *jobs, COLUMNS=columns).stdout.split()
        assert all(words.count(job) >= 2 for job in jobs)
        assert {"0.12346", "12346", "0.000125", "training.optimizer.learning_rate"} <= {*words}
        assert {*jobs} <= {*run("jobs", COLUMNS=columns).stdout.split()}


def test_trials_of_a_sweep_are_whole(plane: Plane, client: Client, digits: dict[str, Any], run: Any) -> None:
    fields = ("learning_rate", "weight_decay")
    spec = {
        "kind": "sweep",
        "job": {**digits, "training": {"steps": 20, "validate_every": 5}},
        "fields": {
            **{f"training.optimizer.{name}": {"values": [0.000125, 0.0125]} for name in fields},
            "training.batch_size": {"values": [16, 32]},
        },
        "jobs_at_once": 3,
    }
    sweep = client.submit(spec)
    found = trials(plane, sweep, 3)
    begin(plane, found[0])
    validate(plane, found[0], 5, 0.123456)
    for columns in ("60", "80"):
        words = run("show", sweep.id, COLUMNS=columns).stdout.split()
        assert {sweep.id, *(trial.id for trial in found)} <= {*words}
        assert {"0.000125", "0.0125", "0.1235", "16", "32", *fields} <= {*words}
    status = json.loads(run("status", "--json").stdout)
    (shown,) = status["sweeps"]
    counts = {name: shown[name] for name in ("id", "running", "waiting", "ended", "best", "best_value")}
    number = found[0].trial.number
    assert counts == {
        "id": sweep.id, "running": 1, "waiting": 7, "ended": 0, "best": number, "best_value": 0.123456,
    }  # fmt: skip
    assert {one["id"] for one in status["queue"]} <= {sweep.id}
    line = run("status", COLUMNS="80").stdout
    assert f"validation loss 0.1235 (trial {number})" in " ".join(line.split())
    assert found[1].id not in line
    assert found[1].id in run("status", "--trials", COLUMNS="80").stdout
