"""Output of every command: names that strangers chose cannot send control sequences to the terminal."""

from __future__ import annotations

import io

import pytest
from pydantic import TypeAdapter, ValidationError
from rich.live import Live
from rich.table import Table
from rich.text import Text

from share_compute.errors import UserError
from share_compute.files.plain_text import plain
from share_compute_api.schemas.agents import JoinRequest
from share_compute_api.schemas.bodies import InviteRequest, KeyRequest
from share_compute_api.terminal import output
from share_compute_api.terminal.output import Terminal, print_failure

ESCAPE = "\x1b[2Jgone\x9b"


def printed(*things: object) -> str:
    made = Terminal()
    made.file = io.StringIO()
    made.print(*things)
    return made.file.getvalue()


@pytest.mark.parametrize("thing", [f"a {ESCAPE} b", Text(f"a {ESCAPE} b")])
def test_control_characters_of_old_rows_are_written_out(thing: object) -> None:
    assert printed(thing) == "a \\x1b[2Jgone\\x9b b\n"


def test_what_is_live_cannot_command_the_terminal_either() -> None:
    made = Terminal()
    made.file = io.StringIO()
    table = Table(box=None)
    table.add_row(Text(f"a {ESCAPE} b"))
    with Live(table, console=made):
        made.print("above")
    assert "a \\x1b[2Jgo" in made.file.getvalue()
    assert "\x1b" not in made.file.getvalue()


def test_colours_and_lines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed("[red]a[/red]\nb") == "a\nb\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert printed("[red]a[/red]") == "\x1b[31ma\x1b[0m\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Ada\u2019s \U0001f5a5\ufe0f", None), ("a\tb", "a\\tb"), ("\ud800", "\\ud800"), ("", None)],
)
def test_plain_text(text: str, shown: str | None) -> None:
    assert plain(text) == (text if shown is None else shown)


@pytest.mark.parametrize(
    ("body", "field"),
    [(InviteRequest, "label"), (KeyRequest, "name"), (JoinRequest, "name"), (JoinRequest, "host")],
)
def test_names_in_requests_have_none(body: type, field: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        TypeAdapter(body).validate_python({field: ESCAPE})
    assert field in {error["loc"][0] for error in refusal.value.errors() if error["type"] != "missing"}


def test_each_problem_of_an_error_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    fields = [{"field": "training.steps", "problem": "is missing"}, {"field": "", "problem": "no data"}]
    failure = UserError("all", hint="fix it", details={"fields": fields, "more": 3})
    print_failure(failure, as_json=False)
    lines = ["error: training.steps: is missing", "       no data", "       and 3 more", "       fix it"]
    assert capsys.readouterr().err.splitlines() == lines
    print_failure(UserError("alone"), as_json=False)
    assert capsys.readouterr().err == "error: alone\n"


def test_further_lines_of_a_fact_are_indented(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(output, "console", output.Terminal())
    output.print_fact("placement", "layers 0-2: ash; layers 3-5: birch\nidle: [bold]elm[/bold]")
    output.print_fact("ash", "the fastest machine of all that are free", soft_wrap=True)
    assert capsys.readouterr().out.splitlines() == [
        "placement   layers 0-2: ash; layers 3-5:",
        "            birch",
        "            idle: elm",
        "ash         the fastest machine of all that are free",
    ]
