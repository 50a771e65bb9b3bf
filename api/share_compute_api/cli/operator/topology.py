"""``share-compute topology``: writes the measured machines and links as a file for ``plan`` and ``simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from share_compute_api.terminal.options import Json


def topology(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; JSON if its name ends in .json, else YAML."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print or write a topology file: the ready machines with their measured speeds and links."""
    from share_compute.files.topology_file import write_topology
    from share_compute.lifecycle.states import ContributorState
    from share_compute_api.client.client import Client
    from share_compute_api.client.job_file import write_text
    from share_compute_api.terminal.output import Terminal, console, print_text

    with Client() as client:
        found = client.topology()
        ready = client.contributors(state=[ContributorState.ready])
    missing = len(ready) - len(found.contributors)
    if missing > 0:
        left_out = "1 machine is" if missing == 1 else f"{missing} machines are"
        Terminal(stderr=True).print(f"{left_out} left out: measurements are missing or impossible")
    is_json = as_json or (output is not None and output.suffix == ".json")
    text = write_topology(found, "json" if is_json else "yaml")
    if output is None:
        print_text(text)
        return
    write_text(output, text)
    if not as_json:
        count = len(found.contributors)
        machines = f"{count} machine" if count == 1 else f"{count} machines"
        console.print(f"{machines} and {len(found.links)} links written to {escape(str(output))}")
