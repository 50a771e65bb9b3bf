"""Options and arguments that several commands share, and a prompt for confirmation."""

from __future__ import annotations

import re
import sys
from typing import Annotated, TypeAlias

import typer

from share_compute.errors import UserError
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


def duration_s(text: str) -> float:
    """Return the seconds in a duration such as ``90s``, ``30m``, ``12h`` or ``7d``.

    Raises:
        UserError: the text is not a duration.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip().lower())
    if found is None:
        raise UserError(f"{text!r} is not a time", hint="write it like 90s, 30m, 12h or 7d")
    return float(found[1]) * UNITS_S[found[2]]


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user to confirm an action that cannot be undone; with ``yes``, do not ask.

    Raises:
        UserError: there is no terminal on which to ask.
        typer.Abort: the user did not confirm.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"{question} There is no terminal to answer on", hint="pass --yes")
    typer.confirm(question, abort=True, err=True)
