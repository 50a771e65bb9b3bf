"""Commands for the systemd service of this machine: ``service install``, ``service status``, ``service uninstall``."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.markup import escape

from share_compute_actors.machine.ports import DEFAULT_RANGE
from share_compute_api.cli.contributor.join import (
    Address,
    CpuThreads,
    Device,
    DownloadLimit,
    Fingerprint,
    Insecure,
    Invite,
    InviteFile,
    Label,
    LeaveWithin,
    Lending,
    Memory,
    Name,
    PortRange,
    UploadLimit,
    Url,
    own_identities,
    read_invite,
)
from share_compute_api.terminal.options import PRIVATE_UMASK, Json
from share_compute_api.terminal.output import console, print_json, print_text
from share_compute_api.terminal.usage import CommandGroup

app = CommandGroup(
    no_args_is_help=True, help="Lend this machine from its boot on, as a systemd user service."
)


@app.command("install")
def install_service(  # noqa: PLR0917  # typer passes each by its name
    url: Url,
    invite: Invite = None,
    invite_file: InviteFile = None,
    name: Name = None,
    device: Device = None,
    memory: Memory = None,
    cpu_threads: CpuThreads = None,
    upload_limit: UploadLimit = None,
    download_limit: DownloadLimit = None,
    label: Label = None,
    address: Address = None,
    fingerprint: Fingerprint = None,
    insecure: Insecure = False,
    port_range: PortRange = str(DEFAULT_RANGE),
    leave_within: LeaveWithin = 60.0,
    print_unit: Annotated[
        bool, typer.Option("--print", help="Print the unit; join nothing and install nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Join a cluster with this machine, now and after each boot."""
    from share_compute.settings import ClientSettings
    from share_compute_api.agent import systemd
    from share_compute_api.agent.joining import default_name
    from share_compute_api.connection.transport import require_server_url

    os.umask(PRIVATE_UMASK)
    require_server_url(url, has_tls="." in (invite or ""))
    name = name or default_name()
    lending = Lending(
        url=url,
        name=name,
        device=device or (),
        memory=memory,
        cpu_threads=cpu_threads,
        upload_limit=upload_limit,
        download_limit=download_limit,
        label=label or (),
        address=address,
        fingerprint=fingerprint,
        insecure=insecure,
        port_range=port_range,
        leave_within=leave_within,
    )
    data_folder = ClientSettings().data_folder.expanduser().absolute()
    unit = systemd.unit_text([*lending.arguments(), "--json"], url, data_folder, leave_within)
    if print_unit:
        print_text(unit)
        return
    systemd.systemctl("daemon-reload")  # runs first, so that its failure does not use up the invite
    identities = own_identities()
    command = f"share-compute service install {url}"
    code = read_invite(invite, invite_file, identities, lending, command=command)
    devices = lending.devices(code)
    if code is not None:
        from share_compute_api.agent.host import enroll

        enroll(devices, lambda _view: None, identities, name)
    warning = systemd.install(name, unit)
    if as_json:
        print_json({"unit": systemd.unit_name(name), "warning": warning})
        return
    console.print(f"{systemd.unit_name(name)} runs, now and after each boot")
    if warning:
        console.print(f"[yellow]{escape(warning)}[/]", soft_wrap=True)


@app.command("status")
def service_status(name: Name = None, as_json: Json = False) -> None:
    """Show whether the service is installed and runs. `journalctl --user -u UNIT` shows its log."""
    from share_compute_api.agent import systemd
    from share_compute_api.agent.joining import default_name

    unit = systemd.unit_name(name or default_name())
    shown = systemd.systemctl("show", unit, "--property=LoadState,UnitFileState,ActiveState,SubState")
    facts = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if as_json:
        print_json({"unit": unit, **facts})
        return
    if facts.get("LoadState") != "loaded":
        console.print(f"{unit} is not installed: share-compute service install URL")
        return
    console.print(
        f"{unit}  {facts.get('ActiveState')} ({facts.get('SubState')}), {facts.get('UnitFileState')}; "
        f"[dim]log: journalctl --user -u {unit}[/]",
        soft_wrap=True,
    )


@app.command("uninstall")
def uninstall_service(name: Name = None, as_json: Json = False) -> None:
    """Stop and remove the service; the machine leaves the cluster, and keeps its key for rejoining."""
    from share_compute.errors import NotFound
    from share_compute_api.agent import systemd
    from share_compute_api.agent.joining import default_name

    name = name or default_name()
    if not systemd.uninstall(name):
        raise NotFound(
            f"{systemd.unit_name(name)} is not installed", hint="name the machine: --name, as at its install"
        )
    if as_json:
        print_json({"unit": systemd.unit_name(name)})
    else:
        console.print(f"{systemd.unit_name(name)} is removed")
