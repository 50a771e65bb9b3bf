"""The command ``preview-data``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import console, print_json, print_table

if TYPE_CHECKING:
    from share_compute.files.data_preview import Cell, DataPreview

_MOST_CHARACTERS = 60
"""Maximum number of characters of a cell in a terminal."""
_LARGE = 1e5
"""Magnitude from which a number has two decimals instead of six significant digits, so that its whole part is whole."""


def preview_data(
    file: Annotated[Path, typer.Argument(help="Job file (YAML or JSON), or - for standard input.")],
    as_json: Json = False,
) -> None:
    """Print the first ten rows of a training job's data, as training would read them. Nothing is queued.

    With --json, images are PNG files in base64.
    """
    from share_compute_api.client.client import Client
    from share_compute_api.client.job_file import read_job

    job = read_job(file)
    with Client() as client:
        found = client.preview_data(job)
    if as_json:
        print_json(found)
        return
    for preview in found.tasks:
        if preview.task is not None:
            console.print(f"[bold]{escape(preview.task)}[/bold]")
        _print(preview.data)


def _print(data: DataPreview) -> None:
    headers = [
        f"{escape(column.name)} ({column.kind}{', target' if column.is_target else ''})"
        for column in data.columns
    ]
    kinds = [column.kind for column in data.columns]
    print_table(
        headers,
        ([_cell(kind, value) for kind, value in zip(kinds, row, strict=True)] for row in data.rows),
        empty="The first file has no rows.",
    )
    if data.left_out:
        console.print(f"[dim]{data.left_out} more features are not shown[/dim]")


def _cell(kind: str, value: Cell) -> str | None:
    if value is None:
        return None
    if isinstance(value, float | int):
        return _written(float(value))
    if kind == "image":
        return "(image)"
    text = " ".join(value.split())
    return escape(text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…")


def _written(value: float) -> str:
    """Return a number as on the page: whole numbers have all digits, others six."""
    if value.is_integer() and abs(value) < 1 / sys.float_info.epsilon:
        return f"{value:.0f}"
    return f"{value:.6g}" if abs(value) < _LARGE else f"{value:.2f}"
