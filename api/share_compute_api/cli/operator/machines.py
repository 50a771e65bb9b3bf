"""Commands for single machines and the cluster token: ``remove``, ``rotate-token``, ``measure``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from share_compute.quantities import listed
from share_compute_api.terminal.machines import machine_called
from share_compute_api.terminal.options import Json, Yes, confirm
from share_compute_api.terminal.output import console, print_json, state_text

if TYPE_CHECKING:
    from share_compute.store import ContributorRecord
    from share_compute_api.client.client import Client

_COST = (
    "All machines restart their Ray nodes, which takes about a minute. Jobs write a checkpoint first and continue "
    "from it; streams of served models wait."
)


def remove(
    machine: Annotated[str, typer.Argument(metavar="MACHINE", help="Name or id of the machine.")],
    keep_token: Annotated[
        bool,
        typer.Option(
            "--keep-token", help="Keep the cluster's token and the machine's invite; for a trusted owner."
        ),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove a machine: it hands over its work and leaves, and a new cluster token ends its access.

    The other devices of its host that joined with the same invite are removed too, because the owner has all their
    keys. The invite by which it joined is revoked, so a removed machine needs a new one to rejoin.
    """
    from share_compute_api.client.client import Client

    with Client() as client:
        found, *others = _family(client, machine)
        beside = f" and, of the same host, {listed([one.name for one in others])}" if others else ""
        cost = "" if keep_token else f"{_COST} "
        confirm(f"{cost}Remove {found.name}{beside}?", yes=yes)
        gone = client.remove_contributor(found.id, keep_token=keep_token)
    if as_json:
        print_json(gone)
    else:
        console.print(f"{escape(gone.name)}  {state_text(gone.state.value)}  {escape(gone.reason)}")


def rotate_token(yes: Yes = False, as_json: Json = False) -> None:
    """Change the token that all Ray nodes of the cluster share; machines with only the old token lose access."""
    from share_compute_api.client.client import Client

    confirm(f"{_COST} Change the cluster's token?", yes=yes)
    with Client() as client, console.status("Jobs write their checkpoints, and the head restarts..."):
        done = client.rotate_token()
    if as_json:
        print_json(done)
    else:
        jobs = "1 job continues" if done.jobs == 1 else f"{done.jobs} jobs continue"
        console.print(f"The token was changed in {done.seconds:.0f} s; {jobs} when the machines are back.")


def measure(
    machine: Annotated[str, typer.Argument(metavar="MACHINE", help="Name or id of the machine.")],
    as_json: Json = False,
) -> None:
    """Measure a machine again, as soon as all devices of its host are idle."""
    from share_compute_api.client.client import Client

    with Client() as client:
        measured = client.measure_contributor(_family(client, machine)[0].id)
    if as_json:
        print_json(measured)
        return
    when = "when its work is done" if measured.is_leased else "now"
    console.print(
        f"{escape(measured.name)} is measured {when}; `share-compute contributors` shows the result"
    )


def _family(client: Client, name_or_id: str) -> list[ContributorRecord]:
    """Return the machine with this name or id, then the other devices of its host that joined with the same invite.

    Machines that have left are ignored.

    Raises:
        NotFound: no machine has this name or id.
    """
    here = [record for record in client.contributors() if record.state.value != "left"]
    found = machine_called(name_or_id, here)
    others = (record for record in here if record is not found)
    return [found, *(record for record in others if record.invited_as == found.invited_as)]
