"""``share-compute top``: continuously shows the work of machines, jobs and deployments."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import console, print_json

if TYPE_CHECKING:
    from share_compute_api.client.load import LoadReader


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the present load once, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Show what machines, jobs and deployments do, until Ctrl-C.

    Without a terminal, each change is one line. With --json, each update is one line of JSON.
    """
    from share_compute_api.client.client import Client
    from share_compute_api.client.load import LoadReader
    from share_compute_api.terminal.load import load_tables

    with Client() as client:
        reader = LoadReader(client)
        if once:
            load = reader.read()
            if as_json:
                print_json(load)
            else:
                console.print(load_tables(load, console), crop=False)
            return
        try:
            if as_json or not console.is_terminal:
                _print_changes(reader, every, as_json=as_json)
            else:
                _show(reader, every)
        except KeyboardInterrupt:
            return


def _show(reader: LoadReader, every_s: float) -> None:
    """Show the load on the whole screen, until Ctrl-C."""
    from share_compute_api.terminal.load import load_tables

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(load_tables(reader.read(), console), refresh=True)
            time.sleep(every_s)


def _print_changes(reader: LoadReader, every_s: float, *, as_json: bool) -> None:
    """Print the load as lines, until Ctrl-C."""
    from share_compute_api.terminal.load import changes

    before = None
    while True:
        load = reader.read()
        if as_json:
            print_json(load, compact=True)
        else:
            for line in changes(before, load):
                console.print(line, markup=False, soft_wrap=True)
            sys.stdout.flush()
        before = load
        time.sleep(every_s)
