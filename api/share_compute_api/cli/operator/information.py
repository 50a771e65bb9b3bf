"""Commands that show information: ``contributors``, ``config``, ``schema``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic_settings import BaseSettings
from rich.markup import escape

from share_compute.labels import label_texts
from share_compute.lifecycle.states import ContributorState
from share_compute.quantities import bytes_text, percent_text, rate_text, seconds_text
from share_compute.settings import PREFIX, variable_of
from share_compute.topology import HEAD
from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.machines import served_names, work_of
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import (
    console,
    machine_state,
    print_items,
    print_table,
    print_text,
    since,
    state_text,
)

if TYPE_CHECKING:
    from share_compute.store import ContributorRecord
    from share_compute.topology import Link
    from share_compute_api.schemas.utilization import UtilizationSample


def contributors(
    links: Annotated[bool, typer.Option("--links", help="List the measured links between machines.")] = False,
    as_json: Json = False,
) -> None:
    """List the machines with their measurements; devices that joined with the same invite are listed together."""
    from share_compute_api.client.client import Client

    with Client() as client:
        found = client.contributors()
        used = {one: each.latest for one, each in client.utilization().machines.items()}
        served = served_names(client, found)
    places: dict[str, int] = {}
    for place, one in enumerate(found):
        places.setdefault(one.invited_as, place)
    found.sort(key=lambda one: places[one.invited_as])
    measured = [link for one in found if one.state is ContributorState.ready for link in one.links or ()]
    if as_json:
        print_items(measured if links else [_with_utilization(one, used.get(one.id)) for one in found])
        return
    if links:
        _print_links(measured, {HEAD: "the server", **{one.id: one.name for one in found}})
        return
    sharing = Counter(one.host_id for one in found if one.host_id and one.left_at is None)
    has_limits = any(_rates(one) for one in found)
    has_labels = any(one.labels for one in found)
    rows = (
        (
            one.id,
            escape(one.name),
            escape(one.host) + (f", shared by {sharing[one.host_id]}" if sharing[one.host_id] > 1 else ""),
            state_text(machine_state(one.state, is_leased=one.is_leased)),
            f"{one.machine().whole.flops_per_s() / 1e9:.1f}" if one.capacity else None,
            bytes_text(one.machine().whole.memory_bytes) if one.capacity else None,
            *([_busy(used.get(one.id))] if used else []),
            *([_rates(one) or None] if has_limits else []),
            *([escape(", ".join(label_texts(one.labels))) or None] if has_labels else []),
            work_of(one, served),
            since(one.last_seen_at),
            escape(one.reason),
        )
        for one in found
    )
    busy = ("busy",) * bool(used)
    rates = ("limits",) * has_limits + ("labels",) * has_labels
    columns = ("id", "name", "host", "state", "GFLOP/s", "memory", *busy, *rates, "work", "seen", "reason")
    print_table(columns, rows, empty="No machine joined yet. Let one in: share-compute invite")


def _print_links(links: Iterable[Link], names: Mapping[str, str]) -> None:
    """Print measured links.

    Args:
        links: the links.
        names: id of a machine -> its name.
    """
    print_table(
        ("from", "to", "latency", "bandwidth"),
        (
            (
                *(escape(names.get(end, end)) for end in (link.source, link.target)),
                *(
                    (None, "[red]cut off[/red]")
                    if link.is_dead
                    else (seconds_text(link.latency_s), rate_text(link.bytes_per_s))
                ),
            )
            for link in links
        ),
        empty="No link was measured yet.",
    )


def _with_utilization(machine: ContributorRecord, used: UtilizationSample | None) -> dict[str, Any]:
    """Return the JSON form of a machine with its utilization; null if nothing was measured in the last minute."""
    utilization = None if used is None else used.model_dump(mode="json")
    return {**machine.model_dump(mode="json"), "utilization": utilization}


def _busy(used: UtilizationSample | None) -> str | None:
    """Return the fraction of the lent GPU or CPU threads in use; None without a measurement."""
    return None if used is None or used.busy_fraction is None else percent_text(used.busy_fraction)


def _rates(machine: ContributorRecord) -> str:
    """Return the rates that the machine's owner allows; empty if there is no limit."""
    named = (("up", "upload_bytes_per_s"), ("down", "download_bytes_per_s"))
    return ", ".join(
        f"{way} {rate_text(rate)}" for way, name in named if (rate := machine.limits.get(name)) is not None
    )


def config(
    setting: Annotated[
        str | None, typer.Argument(help="Show only settings whose name contains this, with their meaning.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the settings with their values, and whether a value is a default or from the environment."""
    from share_compute.errors import NotFound
    from share_compute.files.strict import suggestion
    from share_compute.settings import ClientSettings, Settings

    wanted = (setting or "").lower().removeprefix(PREFIX.lower())
    found: dict[str, dict[str, Any]] = {}
    for settings in (Settings(), ClientSettings()):
        for name, field in type(settings).model_fields.items():
            if wanted in name:
                found.setdefault(
                    name,
                    {
                        "name": name,
                        "value": _shown(settings, name),
                        "origin": _origin(settings, name),
                        "variable": variable_of(name),
                        "description": field.description or "",
                    },
                )
    if not found:
        names = [*Settings.model_fields, *ClientSettings.model_fields]
        raise NotFound(
            f"no setting is called {setting}{suggestion(wanted, names)}",
            hint="share-compute config lists them",
        )
    if as_json:
        print_items(found.values())
        return
    rows = (
        (
            one["variable"],
            None if one["value"] in (None, "", []) else escape(_plain(one["value"])),
            heading("yes") if one["origin"] != "default" else None,
            *([escape(one["description"].replace("``", ""))] if setting else []),
        )
        for one in found.values()
    )
    print_table(("variable", "value", "set", *(["meaning"] if setting else [])), rows, empty="")
    if not setting:
        console.print(f"[dim]The meaning of one: share-compute config {next(iter(found))}[/dim]")
        console.print(f"[dim]{translated('Options of a running `share-compute up` are not included.')}[/dim]")


def schema(
    kind: Annotated[str, typer.Argument(help="train, generate, embed, sparse, sweep or serve.")] = "train",
) -> None:
    """Print the JSON schema of job files of one kind, for editors."""
    from typing import cast, get_args

    from share_compute.errors import UserError
    from share_compute.specification import Kind, job_schema

    if kind not in get_args(Kind):
        raise UserError(f"there is no kind {kind}", hint=f"known: {', '.join(get_args(Kind))}")
    print_text(json.dumps(job_schema(cast("Kind", kind)), indent=2) + "\n")


def print_version(wanted: bool) -> None:
    """Print the version and exit, if ``--version`` was given."""
    if wanted:
        from share_compute import __version__

        print_text(f"share-compute {__version__}\n")
        raise typer.Exit


def _origin(settings: BaseSettings, name: str) -> str:
    if name not in settings.model_fields_set:
        return "default"
    return "environment" if any(key.upper() == variable_of(name) for key in os.environ) else "given"


def _plain(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _shown(settings: BaseSettings, name: str) -> Any:
    value = getattr(settings, name)
    if value is None:
        return None
    if isinstance(value, tuple):
        return [str(part) for part in value]
    if name == "api_key":
        return "(set)"
    if name == "database_url":
        from sqlalchemy import make_url

        return make_url(value).render_as_string(hide_password=True)
    return value if isinstance(value, int | float | str) else str(value)
