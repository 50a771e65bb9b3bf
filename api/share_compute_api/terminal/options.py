"""Options and arguments that several commands share, and a prompt for confirmation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Annotated, TypeAlias

import typer

from share_compute.errors import UserError
from share_compute.quantities import seconds_text
from share_compute_api.terminal.completion import complete_job

PRIVATE_UMASK = 0o077
"""Umask for processes that store secrets: only their user can read the files that they create."""

UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Unit -> its length in seconds, for durations that users enter."""

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Job: TypeAlias = Annotated[
    str, typer.Argument(metavar="JOB", help="Id of the job.", autocompletion=complete_job)
]


def duration_s(text: str, option: str, *, least_s: float = 0.0, most_s: float = inf) -> float:
    """Return the seconds in a duration such as ``90s``, ``30m``, ``12h`` or ``7d``.

    Args:
        text: the duration.
        option: name of the option, for errors.
        least_s: shortest allowed duration, in seconds.
        most_s: longest allowed duration, in seconds.

    Raises:
        UserError: the text is not a duration, or the duration is not allowed.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|m|h|d)\s*", text.lower())
    if found is None:
        raise UserError(f"{option}: {text!r} is not a time", hint="write it like 90s, 30m, 12h or 7d")
    seconds = float(found[1]) * UNITS_S[found[2]]
    if not least_s <= seconds <= most_s:
        limits = f"at least {seconds_text(least_s)}" if most_s == inf else f"at most {seconds_text(most_s)}"
        if least_s and most_s < inf:
            limits = f"from {seconds_text(least_s)} to {seconds_text(most_s)}"
        raise UserError(f"{option}: {text!r} is out of range", hint=f"give a time {limits}, such as 1h")
    return seconds


@contextmanager
def about_option(name: str) -> Iterator[None]:
    """Begin the message of each `UserError` from the block with the name of an option."""
    try:
        yield
    except UserError as failure:
        raise UserError(f"{name}: {failure.message}", hint=failure.hint, details=failure.details) from failure


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user to confirm an action that cannot be undone; with ``yes``, do not ask.

    Raises:
        UserError: there is no terminal on which to ask.
        typer.Abort: the user did not confirm.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"{question} There is no terminal to ask at", hint="to confirm, pass --yes")
    typer.confirm(question, abort=True, err=True)
