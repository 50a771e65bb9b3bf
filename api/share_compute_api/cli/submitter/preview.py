"""The command ``preview-data``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import console, number, print_json, print_table

if TYPE_CHECKING:
    from share_compute.files.data_preview import Cell, DataPreview

_MOST_CHARACTERS = 60
"""Maximum number of characters of a cell in a terminal."""
_DIGITS = 6
"""Significant digits of a number; the page shows as many."""


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
        return number(value, _DIGITS)
    if kind == "image":
        return "(image)"
    text = " ".join(value.split())
    return escape(text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…")
