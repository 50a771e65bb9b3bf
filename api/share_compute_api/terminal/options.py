"""Options and arguments that several commands share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from share_compute_api.terminal.completion import complete_job

PRIVATE_UMASK = 0o077
"""Umask of processes that store secrets: files of the process and its children are readable by the same user only."""

UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Unit -> seconds, for times that users write."""

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Job: TypeAlias = Annotated[
    str, typer.Argument(metavar="JOB", help="Id of the job.", autocompletion=complete_job)
]
