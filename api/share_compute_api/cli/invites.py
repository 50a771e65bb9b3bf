"""Commands for invites: ``invite`` makes one; ``invite list``, ``invite revoke``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from share_compute_api.cli.options import Json
from share_compute_api.cli.output import console, print_json, print_table, since, state_text
from share_compute_api.join_line import INSTALL_COMMAND, is_for_this_machine_alone

app = typer.Typer(
    help="Make, list and revoke invites; plain `invite` makes one.", invoke_without_command=True
)
Label = Annotated[str | None, typer.Option(help="For whom or what it is.")]
ExpiresIn = Annotated[float, typer.Option("--expires-in-s", min=1, help="Seconds that it works for.")]


@app.callback()
def invite(
    context: typer.Context, label: Label = None, expires_in_s: ExpiresIn = 3600, as_json: Json = False
) -> None:
    """Make, list and revoke invites; plain `invite` makes one."""
    if context.invoked_subcommand is None:
        create_invite(label, expires_in_s, as_json)


@app.command("create")
def create_invite(label: Label = None, expires_in_s: ExpiresIn = 3600, as_json: Json = False) -> None:
    """Make an invite: a code that lets one machine join, once."""
    from share_compute_api.client import Client

    with Client() as client:
        made = client.create_invite(label, expires_in_s)
    if as_json:
        print_json(made)
        return
    console.print(f"[dim]One machine can join with this, {since(made.expires_at)} at the latest:[/dim]")
    console.print(made.join_command, markup=False, soft_wrap=True)
    console.print("[dim]If share-compute is not installed there, first:[/dim]")
    console.print(INSTALL_COMMAND, markup=False, soft_wrap=True)
    console.print("[dim]With `service install` in place of `join` it joins at each boot.[/dim]")
    if is_for_this_machine_alone(made.join_command):
        console.print("[dim]Only the server's own machine can; `up --host 0.0.0.0` lets others join.[/dim]")


@app.command("list")
def list_invites(as_json: Json = False) -> None:
    """List invites, newest first."""
    from share_compute_api.client import Client

    with Client() as client:
        found = client.invites()
    if as_json:
        print_json(found)
        return
    rows = (
        (
            one.id,
            state_text(one.state),
            escape(one.label or ""),
            since(one.created_at),
            since(one.expires_at),
            escape(one.machine or one.used_by or ""),
        )
        for one in found
    )
    print_table(("id", "state", "label", "made", "expires", "used by"), rows, empty="No invites yet.")


@app.command("revoke")
def revoke_invite(
    invite_id: Annotated[str, typer.Argument(metavar="INVITE", help="Id of the invite.")],
    as_json: Json = False,
) -> None:
    """Take an invite back."""
    from share_compute_api.client import Client

    with Client() as client:
        gone = client.revoke_invite(invite_id)
    if as_json:
        print_json(gone)
    else:
        console.print(f"{gone.id}  {state_text(gone.state)}")
