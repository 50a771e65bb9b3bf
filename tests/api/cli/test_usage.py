"""Help at 80 columns, and wrong arguments that are refused before a server is asked."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from share_compute.settings import Settings
from share_compute_api import cli


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all commands below a group, with their names."""
    for name, below in getattr(command, "commands", {}).items():
        yield (*path, name), below
        yield from commands(below, *path, name)


def test_arguments_have_names_in_capitals() -> None:
    odd = [
        (*path, parameter.metavar)
        for path, command in commands(typer.main.get_command(cli.make_app()))
        for parameter in command.params
        if parameter.param_type_name == "argument" and not re.fullmatch(r"[A-Z|.]+", parameter.metavar or "")
    ]
    assert odd == []


def test_a_variable_that_nothing_reads_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SHARE_COMPUTE_DATA_FODLER", "share_compute_xyz", "SHARE_COMPUTE_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "argv", ["share-compute", "schema"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.splitlines() == [
        "warning: nothing reads the variable SHARE_COMPUTE_DATA_FODLER; did you mean SHARE_COMPUTE_DATA_FOLDER?",
        "warning: nothing reads the variable SHARE_COMPUTE_XYZ",
    ]


def test_the_help_of_up_has_the_defaults_of_the_settings() -> None:
    output = CliRunner().invoke(cli.make_app(), ["up", "--help"], env={"COLUMNS": "400"}).output
    for name in ("host", "port", "port_range"):
        option = next(line for line in output.splitlines() if f"--{name.replace('_', '-')} " in line)
        assert f"Default: {Settings.model_fields[name].default}." in option


@pytest.mark.parametrize(
    "words", [["up"], ["join"], ["plan"], ["jobs"], ["serve"], ["keys", "create"], ["cancel"]]
)
def test_help_fits_into_80_columns_with_whole_words(words: list[str]) -> None:
    output = (
        CliRunner().invoke(cli.make_app(), [*words, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).output
    )
    assert output
    assert max(map(len, output.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in output  # a word that was cut
    assert "``" not in output
    assert (
        re.findall(r"<[a-z][^>\s]*\s", output.replace("<int range>", "").replace("<float range>", "")) == []
    )


def wrong(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a command that fails, and return the lines of its error."""
    monkeypatch.setattr(sys, "argv", ["share-compute", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code
    return [line.strip() for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["submit", ""], "error: FILE is empty", "share-compute submit --help"),
        (["upload", ""], "error: PATH is empty", "share-compute upload --help"),
        (["show", ""], "error: JOB is empty", "share-compute show --help"),
        (["compare", "job-1", ""], "error: JOB is empty", "share-compute compare --help"),
        (["up", "--data-folder", ""], "error: --data-folder is empty", "share-compute up --help"),
        (["up", "--data-folder="], "error: --data-folder is empty", "share-compute up --help"),
        (["submit", "lost.yaml"], "error: lost.yaml does not exist$", "check the name"),
        (
            ["submit", "jobs.yaml"],
            "error: jobs.yaml does not exist; did you mean 'job.yaml'",
            "check the name",
        ),
        (
            ["plan", "job.yaml", "--operators", "--devices", "0"],
            "error: --devices: must be at least 1",
            "--help",
        ),
        (
            ["plan", "job.yaml", "--topology", "job.yaml"],
            "error: job.yaml: the topology is of kind 'train'",
            "share-compute topology",
        ),
        (["simulate", "job.yaml", "--hours", "0"], "error: --hours: must be at least", "--help"),
        (["join", "nonsense"], "error: 'nonsense' is not the URL of a server", "write it like https"),
        (
            ["join", "http://127.0.0.1:1", "--invite-file", "lost"],
            "error: lost does not exist",
            "check the name",
        ),
        (
            ["service", "install", "ftp://x"],
            "error: 'ftp://x' is not the URL of a server",
            "write it like https",
        ),
        (["restore", "lost.db"], "error: there is no backup .*lost.db", "look into the folder"),
    ],
)
def test_wrong_arguments(
    words: list[str],
    message: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARE_COMPUTE_DATA_FOLDER", str(tmp_path / "data"))
    (tmp_path / "job.yaml").write_text("kind: train\nmodel: {path: x}\ndata: {files: [a.txt]}\n")
    found = wrong(words, monkeypatch, capsys)
    assert re.match(message, found[0])
    assert hint in found[-1]
