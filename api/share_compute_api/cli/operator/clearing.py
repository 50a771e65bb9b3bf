"""``share-compute clear``: ends the quarantine of a machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from share_compute_api.terminal.language import translated
from share_compute_api.terminal.machines import machine_called
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import console, print_json, state_text


def clear(
    machine: Annotated[str, typer.Argument(metavar="MACHINE", help="Name or id of the machine.")],
    as_json: Json = False,
) -> None:
    """End the quarantine of a machine that computed wrong numbers, so that it gets work again."""
    from share_compute_api.client.client import Client

    with Client() as client:
        found = machine_called(machine, client.contributors()[::-1])
        cleared = client.clear_contributor(found.id)
    if as_json:
        print_json(cleared)
        return
    if found.quarantined_for is None and not found.offences:
        console.print(translated(f"{escape(cleared.name)} is not in quarantine: there was nothing to clear"))
        return
    console.print(f"{escape(cleared.name)}: {state_text(cleared.state)}  {escape(cleared.reason)}")
