"""``share-compute doctor``: checks this machine, with a hint for each problem."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.cells import set_cell_size
from rich.markup import escape

from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import console, print_items

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_SIGN = 4
"""Width of the states of checks, in cells."""


def doctor(
    url: Annotated[
        str | None, typer.Option(help="A server to check against; default: this machine's.")
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="First remove the processes and folders that killed runs left.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check versions, ports, disk, memory, clock and graphics driver. Exit with code 1 if a check fails."""
    from share_compute.settings import Settings
    from share_compute_actors.machine.run_folders import sweep
    from share_compute_api.agent.examination import examine

    if clean:
        sweep()
    findings = []
    for finding in examine(Settings(), url):
        findings.append(finding)
        if not as_json:
            text = f"{heading(finding.check)}: {escape(translated(finding.text))}"
            sign = set_cell_size(heading(finding.state), _SIGN)
            console.print(f"[{_STYLES[finding.state]}]{sign}[/] {text}")
            if finding.hint and finding.state != "ok":
                console.print(f"     [dim]{escape(translated(finding.hint))}[/]")
    failed = any(finding.state == "fail" for finding in findings)
    if as_json:
        print_items(map(asdict, findings), ok=not failed)
    raise typer.Exit(1 if failed else 0)
