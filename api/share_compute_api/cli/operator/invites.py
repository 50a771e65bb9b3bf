"""Commands that make, list and revoke invites: ``invite``, ``invite list``, ``invite revoke``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from share_compute_api.connection.join_line import INSTALL_COMMAND, is_for_this_machine_alone
from share_compute_api.schemas.choices import LONGEST_INVITE_S
from share_compute_api.terminal.options import Json, about_option, duration_s
from share_compute_api.terminal.output import (
    console,
    part_text,
    print_items,
    print_json,
    print_table,
    print_text,
    since,
    state_text,
)
from share_compute_api.terminal.usage import CommandGroup

app = CommandGroup(
    help="Make, list and revoke invites; plain `invite` makes one.", invoke_without_command=True
)
Label = Annotated[str | None, typer.Option(help="Person or purpose.")]
Uses = Annotated[int, typer.Option(min=1, help="Number of machines that may join with the invite.")]
Expires = Annotated[str, typer.Option(help="Lifetime of the invite, e.g. 90s, 30m, 12h or 7d.")]
MostMemory = Annotated[
    str | None, typer.Option("--memory", help="Most memory that each machine may lend, e.g. 4GiB.")
]
CodeOnly = Annotated[bool, typer.Option("--code-only", help="Print the code alone.")]


@app.callback()
def invite(
    context: typer.Context,
    label: Label = None,
    uses: Uses = 1,
    expires: Expires = "1h",
    memory: MostMemory = None,
    code_only: CodeOnly = False,
    as_json: Json = False,
) -> None:
    """Make, list and revoke invites; plain `invite` makes one."""
    if context.invoked_subcommand is None:
        create_invite(label, uses, expires, memory, code_only, as_json)


@app.command("create")
def create_invite(
    label: Label = None,
    uses: Uses = 1,
    expires: Expires = "1h",
    memory: MostMemory = None,
    code_only: CodeOnly = False,
    as_json: Json = False,
) -> None:
    """Make an invite: a code that lets machines join."""
    from share_compute_actors.machine.sizes import parse_bytes
    from share_compute_api.client.client import Client

    expires_in_s = duration_s(expires, "--expires", least_s=1, most_s=LONGEST_INVITE_S)
    with about_option("--memory"):
        memory_bytes = parse_bytes(memory) if memory else None
    with Client() as client:
        made = client.create_invite(label, expires_in_s, uses=uses, memory_bytes=memory_bytes)
    if as_json:
        print_json(made)
        return
    if code_only:
        print_text(made.code + "\n")
        return
    who = "One machine" if made.uses == 1 else f"{made.uses} machines"
    console.print(f"[dim]{who} can join with this, {since(made.expires_at)} at the latest:[/dim]")
    console.print(made.join_command, markup=False, soft_wrap=True)
    console.print("[dim]If share-compute is not installed there, first:[/dim]")
    console.print(INSTALL_COMMAND, markup=False, soft_wrap=True)
    console.print("[dim]With `service install` in place of `join` the machine joins at each boot.[/dim]")
    if is_for_this_machine_alone(made.join_command):
        console.print(
            "[dim]Only the server's own machine can join; `up --host 0.0.0.0 --tls self-signed` lets others join.[/dim]"
        )


@app.command("list")
def list_invites(as_json: Json = False) -> None:
    """List invites, newest first."""
    from share_compute.quantities import listed
    from share_compute_api.client.client import Client

    with Client() as client:
        found = client.invites()
    if as_json:
        print_items(found)
        return
    rows = (
        (
            one.id,
            state_text(one.state),
            escape(one.label or ""),
            part_text(len(one.used_by), one.uses),
            since(one.created_at),
            since(one.expires_at) if one.state == "open" else "",
            escape(listed(one.machines)),
        )
        for one in found
    )
    print_table(("id", "state", "label", "used", "made", "expires", "used by"), rows, empty="No invites yet.")


@app.command("revoke")
def revoke_invite(
    invite_id: Annotated[str, typer.Argument(metavar="INVITE", help="Id of the invite.")],
    as_json: Json = False,
) -> None:
    """Revoke an invite."""
    from share_compute_api.client.client import Client

    with Client() as client:
        gone = client.revoke_invite(invite_id)
    if as_json:
        print_json(gone)
    else:
        console.print(f"{gone.id}  {state_text(gone.state)}")
