"""Commands for API keys: ``keys create``, ``keys list``, ``keys revoke``."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from share_compute.errors import UserError
from share_compute.quantities import listed
from share_compute.scopes import Scope
from share_compute_api.terminal.options import Json, Yes, confirm
from share_compute_api.terminal.output import console, print_items, print_json, print_table, since, state_text
from share_compute_api.terminal.usage import CommandGroup

if TYPE_CHECKING:
    from share_compute.store.records import ApiKeyRecord

app = CommandGroup(
    no_args_is_help=True, help="Make, list and revoke API keys, one for each person or program."
)


class _Given(StrEnum):
    """Enumeration of `scopes.GRANTABLE`, which typer needs for ``--scope``."""

    chat = "chat"
    read = "read"
    submit = "submit"
    admin = "admin"


@app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Person or purpose.")],
    scope: Annotated[
        list[_Given] | None,
        typer.Option(
            metavar="SCOPE",
            help="Scope; may be given several times. chat: use served models (the default). read: look at "
            "jobs and machines. submit: also run one's own jobs, and chat. admin: everything.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make an API key. The key is shown only once."""
    from share_compute_api.client.client import Client

    with Client() as client:
        made = client.create_key(name, [Scope(one.value) for one in scope or [_Given.chat]])
    if as_json:
        print_json(made)
        return
    console.print(f"[dim]Scopes: {', '.join(made.scopes)}.[/]")
    console.print(f"[dim]Not shown again; `share-compute keys revoke {made.id}` ends it:[/dim]")
    console.print(made.key, markup=False, soft_wrap=True)
    console.print("[dim]Commands and Python elsewhere use it after:[/dim]")
    console.print(made.export_command, markup=False, soft_wrap=True)
    console.print("[dim]OpenAI clients take it as api_key, and the dashboard asks for it.[/dim]")


@app.command("list")
def list_keys(as_json: Json = False) -> None:
    """List API keys, oldest first, without the keys themselves."""
    from share_compute_api.client.client import Client

    with Client() as client:
        found = client.api_keys()
    if as_json:
        print_items(found)
        return
    rows = (
        (
            one.id,
            escape(one.name),
            ", ".join(one.scopes),
            since(one.created_at),
            since(one.revoked_at) if one.revoked_at else "",
        )
        for one in found
    )
    print_table(("id", "name", "scopes", "made", "revoked"), rows, empty="No keys yet.")


@app.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Name or id of the key.")],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Revoke an API key and end its sessions. Ask for confirmation if this command itself uses the key."""
    from share_compute_api.client.client import Client

    with Client() as client:
        key_id = _id_of(key, client.api_keys())
        if key_id == client.own_key_id():
            confirm(f"Revoke {key_id}? This command uses it; you need another key to go on.", yes=yes)
        gone = client.revoke_key(key_id)
    if as_json:
        print_json(gone)
    else:
        console.print(f"{gone.id}  {escape(gone.name)}  {state_text('revoked')}")


def _id_of(name_or_id: str, keys: Sequence[ApiKeyRecord]) -> str:
    """Return the id of the key with this name or id, or what was given if there is none; valid keys come first.

    Raises:
        UserError: several valid keys have this name.
    """
    if any(one.id == name_or_id for one in keys):
        return name_or_id
    named = [one for one in keys if one.name == name_or_id]
    valid = [one.id for one in named if one.revoked_at is None]
    if len(valid) > 1:
        raise UserError(
            f"{len(valid)} keys are named {name_or_id}: {listed(valid)}",
            hint="give the id; share-compute keys list shows when each was made",
        )
    return next(iter(valid or [one.id for one in named]), name_or_id)
