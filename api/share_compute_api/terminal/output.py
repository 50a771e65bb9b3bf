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
    """Print a table, or the text ``empty`` if there are no rows. A None cell is shown as a dash."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # Users paste ids into the next command, so only columns of prose may wrap.
        table.add_column(column, no_wrap=column not in _PROSE, overflow="fold")
    for row in rows:
        table.add_row(*("[dim]-[/dim]" if cell is None else str(cell) for cell in row))
    console.print(table if table.row_count else f"[dim]{empty}[/dim]")


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
    """Return a number as text with ``digits`` significant digits; None for None."""
    return None if value is None else f"{value:.{digits}g}"


def rate(per_s: float | None) -> str | None:
    """Return a rate per second as text: without decimals from 100 upwards, else with one decimal; None for None."""
    return None if per_s is None else f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def speed(per_s: float | None, *, of_tokens: bool) -> str | None:
    """Return a speed with its unit: tokens/s, or samples/s for a model whose samples are not text; None for None."""
    return None if per_s is None else f"{rate(per_s)} {'tokens/s' if of_tokens else 'samples/s'}"
