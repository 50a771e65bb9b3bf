"""``share-compute up``: runs a server on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from share_compute.settings import Settings
from share_compute_api.connection.join_line import INSTALL_COMMAND, is_for_this_machine_alone
from share_compute_api.terminal.options import PRIVATE_UMASK
from share_compute_api.terminal.output import Terminal, print_warning

if TYPE_CHECKING:
    from share_compute_api.app.server import Running


def up(  # noqa: PLR0917  # typer passes each by its name
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 0.0.0.0, together with --tls, lets other machines join. Default: 127.0.0.1."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 picks a free one. Default: 8700.")
    ] = None,
    data_folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the server keeps its state. Default: share-compute in the user's data folder, which is "
            "~/.local/share on Linux."
        ),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            help="URL of a PostgreSQL database, in the form of SQLAlchemy. Default: SQLite in the data folder."
        ),
    ] = None,
    data_root: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder below which jobs may name files of this machine; may be given several times. Default: the "
            "working folder, if the server listens to this machine only."
        ),
    ] = None,
    tls: Annotated[
        str | None,
        typer.Option(
            metavar="self-signed",
            help="HTTPS with a certificate that the server makes for itself. Default: plain HTTP.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="HTTPS with your certificate: a PEM file with its chain.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key: a PEM file.")] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Let machines join over plain HTTP, which others on the network can read."
        ),
    ] = False,
    advertise_address: Annotated[
        str | None,
        typer.Option(
            help="IP address at which other machines reach this one, if it has several. Default: that of the default "
            "route."
        ),
    ] = None,
    port_range: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST",
            help="TCP ports that the Ray head uses, to open in a firewall beside --port. Default: 24000-25999.",
        ),
    ] = None,
    contribute: Annotated[bool, typer.Option("--contribute", help="Lend this machine too.")] = False,
    allow_failures: Annotated[
        bool,
        typer.Option("--allow-failures", help="Let share-compute chaos kill members of jobs; for tests."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line when the server answers.")
    ] = False,
) -> None:
    """Run a server: a Ray head and the control plane. Ctrl-C shuts it down cleanly; a second Ctrl-C ends it at once."""
    from share_compute_api.app.server import serve
    from share_compute_api.submission.data_roots import offered

    os.umask(PRIVATE_UMASK)
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "data_folder": data_folder,
        "database_url": database_url,
        "data_roots": data_root,
        "tls": tls,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "insecure": insecure or None,
        "advertise_address": advertise_address,
        "port_range": port_range,
        "allow_failures": allow_failures or None,
    }
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    settings = offered(settings, Path.cwd())
    console = Terminal(stderr=as_json)
    with console.status("starting") as status:

        def announce(running: Running) -> None:
            status.stop()
            for warning in running.warnings:
                print_warning(warning)
            if as_json:
                print(json.dumps(_facts(running)), flush=True)
            else:
                console.print(server_text(running, settings.data_roots), soft_wrap=True)

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


def _facts(running: Running) -> dict[str, str | None]:
    return {
        "url": running.url,
        "fingerprint": running.fingerprint,
        "dashboard_url": running.dashboard_url,
        "join_command": running.join_command,
        "data_folder": str(running.data_folder),
        "ray_address": running.ray_address,
    }


def server_text(running: Running, data_roots: Sequence[Path]) -> str:
    """Return the addresses of a server and the commands for its users, as markup.

    The text has no frame, because users who copy wrapped commands would also copy the frame.
    """
    roots = ", ".join(map(str, data_roots)) or "none; share-compute upload sends files"
    is_local = is_for_this_machine_alone(running.join_command)
    who = (
        "Let this machine join; --host 0.0.0.0 --tls self-signed lets others"
        if is_local
        else "Let a machine join"
    )
    lines = (
        "[bold green]share-compute is up[/]",
        "[bold]Dashboard[/] (the link signs in once, within minutes; `share-compute sign-in` makes more)",
        f"  {escape(running.dashboard_url)}",
        f"[bold]{who}[/] (works once, and expires; `share-compute invite` makes more)",
        f"  {escape(running.join_command)}",
        f"  [dim]if share-compute is not installed there, first: {escape(INSTALL_COMMAND)}[/]",
        *([f"[bold]Fingerprint of its key[/]  {running.fingerprint}"] if running.fingerprint else []),
        f"[dim]Jobs may name files below: {escape(roots)}[/]",
        "[dim]Ctrl-C stops the server; its state is kept.[/]",
    )
    return "\n".join(lines)
