"""``share-compute up``: run a server on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel

from share_compute.settings import Settings
from share_compute_api.cli.output import Terminal

if TYPE_CHECKING:
    from share_compute_api.server import Running


def up(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines join.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = None,
    data_folder: Annotated[Path | None, typer.Option(help="Where the server keeps its state.")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="e.g. postgresql+psycopg://user@host/name; default: SQLite.")
    ] = None,
    data_root: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder below which jobs may name files of this machine; may be given several times. Default: the "
            "working folder, if the server listens to this machine only."
        ),
    ] = None,
    contribute: Annotated[bool, typer.Option("--contribute", help="Lend this machine too.")] = False,
    allow_failures: Annotated[
        bool,
        typer.Option("--allow-failures", help="Let share-compute chaos kill members of jobs; for tests."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line when it answers.")] = False,
) -> None:
    """Run a server: a Ray head and the control plane. Ctrl-C stops all it started; twice: at once."""
    from share_compute_api.data_roots import offered
    from share_compute_api.server import serve

    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "data_folder": data_folder,
        "database_url": database_url,
        "data_roots": data_root,
        "allow_failures": allow_failures or None,
    }
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    settings = offered(settings, Path.cwd())
    console = Terminal(stderr=as_json)
    with console.status("starting") as status:

        def announce(running: Running) -> None:
            status.stop()
            if as_json:
                print(json.dumps(_facts(running)), flush=True)
            else:
                console.print(_panel(running, settings.data_roots))

        try:
            serve(
                settings,
                contribute=contribute,
                progress=status.update,
                announce=announce,
            )
        except KeyboardInterrupt:
            status.stop()
            console.print("stopped")


def _facts(running: Running) -> dict[str, str]:
    return {
        "url": running.url,
        "dashboard_url": running.dashboard_url,
        "join_command": running.join_command,
        "data_folder": str(running.data_folder),
        "ray_address": running.ray_address,
    }


def _panel(running: Running, data_roots: Sequence[Path]) -> Panel:
    roots = ", ".join(map(str, data_roots)) or "none; share-compute upload sends files"
    lines = (
        "[bold]Dashboard[/]",
        f"  {escape(running.dashboard_url)}",
        "[bold]Let a machine join[/] (works once, for an hour; `share-compute invite` makes more)",
        f"  {escape(running.join_command)}",
        f"[dim]Jobs may name files below: {escape(roots)}[/]",
        "[dim]Ctrl-C stops the server; it finds its state again.[/]",
    )
    return Panel("\n".join(lines), title="share-compute is up", title_align="left", expand=False)
