"""Output of the command line: tables and text for people, JSON for scripts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from share_compute.errors import ShareComputeError
from share_compute.files.plain_text import plain
from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.tables import WholeTable
from share_compute_api.terminal.wide import WideText, is_wide

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
    "at work": "cyan",
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
_VERY_LARGE = 1e15
"""Magnitude from which numbers are written with a power of ten."""
_FACT = 11
"""Width of the names of facts."""
_CLOSED_PIPE = 141
"""Exit code that a shell reports for a program that was ended by SIGPIPE."""


class Terminal(Console):
    """Console that escapes control characters in untrusted text, and exits when its output pipe is closed."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False)

    def print(self, *objects: Any, markup: bool | None = None, **options: Any) -> None:
        """Print objects; texts in the language of the terminal, except with ``markup=False``, which is for data."""
        if markup is None:
            objects = tuple(translated(one) if isinstance(one, str) else one for one in objects)
        super().print(*objects, markup=markup, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object with the control characters in its text escaped; live displays are rendered here too."""
        if (
            isinstance(renderable, Text)
            and not isinstance(renderable, WideText)
            and is_wide(renderable.plain)
        ):
            renderable = WideText.of(renderable)
        for segment in super().render(renderable, options):
            # This program sets colours as styles, so control characters in text come from untrusted sources.
            yield segment if segment.control else Segment(plain(segment.text, but="\n"), segment.style)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text with markup as a renderable object, which is measured by the characters of its language."""
        found = super().render_str(text, **options)
        return WideText.of(found) if is_wide(found.plain) else found

    def on_broken_pipe(self) -> None:
        """Exit like a program that was ended by SIGPIPE, for example in `share-compute plan job.yaml | head -3`."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        raise SystemExit(_CLOSED_PIPE)


console = Terminal()
_errors = Terminal(stderr=True, soft_wrap=True)


def print_json(value: object, *, compact: bool = False) -> None:
    """Print a value as JSON, in one line if ``compact``."""
    data = TypeAdapter(Any).dump_python(value, mode="json")
    print_text(json.dumps(data, indent=None if compact else 2, ensure_ascii=False) + "\n")


def print_items(items: Iterable[object], **more: Any) -> None:
    """Print a list as JSON, in the form of all lists of the command line: ``{"items": [...], **more}``."""
    print_json({"items": [*items], **more})


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


def print_table(
    columns: Iterable[str], rows: Iterable[Iterable[object]], *, empty: str, right: Collection[str] = ()
) -> None:
    """Print a table as `WholeTable` shows it, or the text ``empty`` if there are no rows."""
    table = WholeTable(columns, rows, right=right)
    if len(table):
        console.print(table, crop=False)
    else:
        console.print(f"[dim]{translated(empty)}[/dim]")


def print_failure(failure: ShareComputeError, *, as_json: bool) -> None:
    """Print an error and its hint to standard error."""
    if as_json:
        document = {"code": failure.code, "detail": failure.message, **failure.facts()}
        sys.stderr.write(json.dumps({"error": document}, default=str) + "\n")
        return
    start = translated("[red]error:[/red] ")
    for number, problem in enumerate(_problems(failure)):
        _errors.print(f"{'       ' if number else start}{escape(problem)}")
    if failure.hint:
        _errors.print(f"       {escape(translated(failure.hint))}", style="dim")


def print_warning(text: str) -> None:
    """Print a warning to standard error, because programs read standard output."""
    _errors.print(escape(f"warning: {text}"))


def print_fact(name: str, value: object, *, soft_wrap: bool = False) -> None:
    """Print a fact: its name, and its value as rich markup, whose further lines are indented.

    Args:
        name: the name.
        value: the value.
        soft_wrap: whether to leave the lines of the value as they are.
    """
    name = heading(name)
    start = f"[bold]{escape(name)}{' ' * (_FACT - cell_len(name))}[/bold] "
    shown = console.render_str(translated(value) if isinstance(value, str) else str(value))
    width = max(_FACT, console.width - _FACT - 1)
    for line in shown.split() if soft_wrap else shown.wrap(console, width):
        line.rstrip()
        console.print(console.render_str(start) + line, soft_wrap=True)
        start = " " * (_FACT + 1)


def _problems(failure: ShareComputeError) -> list[str]:
    """Return the printed problems of an error: one for each invalid field, or the error's message."""
    fields = failure.details.get("fields") or []
    if not fields:
        return [translated(failure.message)]
    file = failure.details.get("file")
    problems = [
        ": ".join(filter(None, (_place(file, one.get("line")), one["field"], translated(one["problem"]))))
        for one in fields
    ]
    more = failure.details.get("more")
    return [*problems, translated(f"and {more} more")] if more else problems


def _place(file: str | None, line: int | None) -> str:
    """Return ``FILE:LINE``, as compilers print it; empty without a file."""
    return ":".join(str(part) for part in (file, line) if part is not None)


def state_text(state: str) -> str:
    """Return a state as rich markup, in its colour."""
    return f"[{STATE_STYLES.get(state, 'default')}]{translated(state)}[/]"


def machine_state(state: str, *, is_leased: bool) -> str:
    """Return ``at work`` for a ready machine that works for a job or a deployment, as on the map, else the state."""
    return "at work" if state == "ready" and is_leased else state


def since(moment: datetime | None) -> str | None:
    """Return the time since or until a moment: ``2 h 5 min ago``, ``in 59 min 3 s``; None for None."""
    if moment is None:
        return None
    seconds = (datetime.now(UTC) - moment).total_seconds()
    return (
        translated(f"{duration(abs(seconds))} ago") if seconds >= 0 else heading(f"in {duration(-seconds)}")
    )


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
    return None if per_s is None else translated(f"{rate(per_s)} {'tokens/s' if of_tokens else 'samples/s'}")


def part_text(done: object, total: object) -> str:
    """Return a part of a whole as text, such as ``12 of 40``."""
    return heading(f"{done} of {total}")
