"""Output of the command line: tables and text for people, JSON for scripts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, TypeAdapter
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from share_compute.errors import ShareComputeError
from share_compute.files.plain_text import plain

STATE_STYLES = {
    "queued": "yellow",
    "planning": "cyan",
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
    "joining": "yellow",
    "probing": "yellow",
    "ready": "green",
    "pending": "yellow",
    "loading": "cyan",
    "degraded": "yellow",
    "stopped": "dim",
    "quarantined": "red",
    "draining": "magenta",
    "left": "dim",
    "lost": "red",
    "open": "green",
    "used": "dim",
    "expired": "yellow",
    "revoked": "magenta",
}
_PROSE = ("reason", "meaning", "value", "label", "model")
_LEAST_PROSE = 20
"""Smallest width of a column of prose."""
_VERY_LARGE = 1e15
"""Magnitude from which numbers are written with a power of ten."""
_GAP = 2
"""Spaces between two columns."""
_CLOSED_PIPE = 141
"""Exit code that a shell reports for a program that was ended by SIGPIPE."""


class Terminal(Console):
    """Console that escapes control characters in untrusted text, and exits when its output pipe is closed."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object with the control characters in its text escaped; live displays are rendered here too."""
        for segment in super().render(renderable, options):
            # This program sets colours as styles, so control characters in text come from untrusted sources.
            yield segment if segment.control else Segment(plain(segment.text, but="\n"), segment.style)

    def on_broken_pipe(self) -> None:
        """Exit like a program that was ended by SIGPIPE, for example in `share-compute plan job.yaml | head -3`."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        raise SystemExit(_CLOSED_PIPE)


console = Terminal()
_errors = Terminal(stderr=True, soft_wrap=True)


def print_json(value: BaseModel | Sequence[BaseModel] | dict[str, Any], *, compact: bool = False) -> None:
    """Print a value as JSON, in one line if ``compact``."""
    data = TypeAdapter(Any).dump_python(value, mode="json")
    print_text(json.dumps(data, indent=None if compact else 2, ensure_ascii=False) + "\n")


def print_text(text: str) -> None:
    """Print text unchanged, for scripts."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        console.on_broken_pipe()  # otherwise click would exit with 1


def print_bytes(data: bytes) -> None:
    """Write bytes unchanged, for scripts."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        console.on_broken_pipe()


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]], *, empty: str) -> None:
    """Print a table, or the text ``empty`` if there are no rows. A None cell is shown as a dash.

    Users paste ids into the next command, so nothing is cut: only columns of prose wrap. Where the table does not fit,
    each row is printed as a paragraph, with the names of its columns. Into a pipe, each row is one line. Line breaks in
    cells are printed as spaces.
    """
    names = tuple(name.replace("\n", " ") for name in columns)
    cells = [[None if cell is None else str(cell).replace("\n", " ") for cell in row] for row in rows]
    if not cells:
        console.print(f"[dim]{empty}[/dim]")
        return
    widths = [
        max(Text.from_markup(text or "-").cell_len for text in (name, *column))
        for name, column in zip(names, zip(*cells, strict=True), strict=True)
    ]
    least = (
        min(width, _LEAST_PROSE) if name in _PROSE else width
        for name, width in zip(names, widths, strict=True)
    )
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.print(_line([f"[bold]{name}[/bold]" for name in names], widths), soft_wrap=True)
        for row in cells:
            console.print(_line(row, widths), soft_wrap=True)
    elif sum(least) + _GAP * (len(names) - 1) <= console.width:
        console.print(_table(names, cells))
    else:
        for row in cells:
            console.print(_paragraph(names, row, console.width), soft_wrap=True)


def _line(row: Sequence[str | None], widths: Sequence[int]) -> Text:
    """Return a row in columns of these widths."""
    line = Text()
    for cell, width in zip(row, widths, strict=True):
        text = Text.from_markup("[dim]-[/dim]" if cell is None else cell)
        line.append_text(text).append(" " * (width - text.cell_len + _GAP))
    line.rstrip()
    return line


def _table(names: Sequence[str], cells: Sequence[Sequence[str | None]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=name not in _PROSE, overflow="fold")
    for row in cells:
        table.add_row(*("[dim]-[/dim]" if cell is None else cell for cell in row))
    return table


def _paragraph(names: Sequence[str], row: Sequence[str | None], width: int) -> Text:
    """Return a row as lines of names and values. The first value is without its name, unless it is a number."""
    first, *others = row
    lines = [Text.from_markup(f"[bold]{first or '-'}[/bold]")]
    if first and first[0].isdigit():
        lines = [Text.assemble((f"{Text.from_markup(names[0]).plain} ", "dim"), lines[0])]
    for name, value in zip(names[1:], others, strict=True):
        if not value:
            continue
        part = Text.assemble((f"{Text.from_markup(name).plain} ", "dim"), Text.from_markup(value))
        if lines[-1].cell_len + _GAP + part.cell_len > width:
            lines.append(Text())
        lines[-1].append(" " * _GAP).append_text(part)
    return Text("\n").join(lines)


def print_failure(failure: ShareComputeError, *, as_json: bool) -> None:
    """Print an error and its hint to standard error."""
    if as_json:
        document = {"code": failure.code, "detail": failure.message, **failure.facts()}
        sys.stderr.write(json.dumps({"error": document}, default=str) + "\n")
        return
    _errors.print(f"[red]error:[/red] {escape(failure.message)}")
    if failure.hint:
        _errors.print(f"       {escape(failure.hint)}", style="dim")


def state_text(state: str) -> str:
    """Return a state as rich markup, in its colour."""
    return f"[{STATE_STYLES.get(state, 'default')}]{state}[/]"


def since(moment: datetime | None) -> str | None:
    """Return the time since or until a moment: ``2 h 5 min ago``, ``in 59 min 3 s``; None for None."""
    if moment is None:
        return None
    seconds = (datetime.now(UTC) - moment).total_seconds()
    return f"{duration(abs(seconds))} ago" if seconds >= 0 else f"in {duration(-seconds)}"


def duration(seconds: float) -> str:
    """Return a duration as text in its two largest units, such as ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def number(value: float | None, digits: int = 4) -> str | None:
    """Return a number as text with ``digits`` significant digits, or its whole part if that has more; None for None."""
    if value is None:
        return None
    return f"{value:.0f}" if 10**digits - 0.5 <= abs(value) < _VERY_LARGE else f"{value:.{digits}g}"


def rate(per_s: float | None) -> str | None:
    """Return a rate per second as text: without decimals from 100 upwards, else with one decimal; None for None."""
    return None if per_s is None else f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def speed(per_s: float | None, *, of_tokens: bool) -> str | None:
    """Return a speed with its unit: tokens/s, or samples/s for a model whose samples are not text; None for None."""
    return None if per_s is None else f"{rate(per_s)} {'tokens/s' if of_tokens else 'samples/s'}"
