"""``share-compute join``: lends this machine to a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Group
from rich.live import Live

from share_compute.quantities import listed
from share_compute_actors.machine.ports import DEFAULT_RANGE
from share_compute_api.cli.contributor.showing import ChangeLines, JsonLines, agent_table
from share_compute_api.connection.join_line import INVITE_VARIABLE
from share_compute_api.terminal.completion import complete_device
from share_compute_api.terminal.language import heading
from share_compute_api.terminal.options import PRIVATE_UMASK, about_option
from share_compute_api.terminal.output import Terminal, console

if TYPE_CHECKING:
    from share_compute_api.agent.agent import AgentStatus
    from share_compute_api.agent.joining import JoinOptions
    from share_compute_api.connection.identity import Identities

Given = TypeVar("Given")
Parsed = TypeVar("Parsed")
_MOST_BYTES = 4096
"""Largest length of a file with an invite, in bytes."""

Url = Annotated[str, typer.Argument(help="URL of the server, e.g. https://192.0.2.1:8700.")]
Invite = Annotated[
    str | None,
    typer.Option(
        envvar=INVITE_VARIABLE,
        help="Code that the operator gave you; not needed by a machine that joined before. Other users of this machine "
        "can read arguments, so prefer the variable or a file.",
    ),
]
InviteFile = Annotated[Path | None, typer.Option(help="File with the code; - reads it from standard input.")]
Name = Annotated[str | None, typer.Option(help="Name of this machine; default: its host name.")]
Device = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DEVICE",
        help="Device to lend; may be given several times. auto: all NVIDIA GPUs, or the CPU if there is none. "
        "cuda:1: one GPU, as `share-compute doctor` lists them. mps: the GPU of an Apple processor. cpu:0 and cpu:1: "
        "logical devices, each with a part of the CPU. Each device joins as a machine of its own, NAME.cuda0, "
        "NAME.cuda1, by one invite. cuda:0+cuda:1: both join as one machine, for work with parallelism.tensor.",
        autocompletion=complete_device,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="Memory to lend, e.g. 4GiB; default: half of what is available. Divided among several devices."
    ),
]
CpuThreads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads to lend; default: all. Divided among several devices."),
]
UploadLimit = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Rate at which this machine may send tensors to other machines, e.g. 10Mbit or 2MB; default: no limit. "
        "Divided among several devices.",
    ),
]
DownloadLimit = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Rate at which this machine may request tensors from other machines, e.g. 50Mbit; default: no limit.",
    ),
]
Label = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Label of this machine, e.g. site=paris; may be given several times. Jobs can name machines by their "
        "labels.",
    ),
]
Address = Annotated[str | None, typer.Option(help="IP address at which other machines reach this one.")]
Fingerprint = Annotated[
    str | None,
    typer.Option(
        help="Fingerprint of the server's key, if the invite has none; `share-compute up` shows it."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Join over plain HTTP, which others on the network can read.")
]
PortRange = Annotated[
    str,
    typer.Option(
        envvar="SHARE_COMPUTE_PORT_RANGE",
        metavar="FIRST-LAST",
        help="TCP ports that this machine uses; open them in its firewall.",
    ),
]
LeaveWithin = Annotated[
    float, typer.Option(min=0, help="Seconds for moving work to the job's other machines when leaving.")
]


def join(  # noqa: PLR0917  # typer passes each by its name
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line at each change.")] = False,
) -> None:
    """Lend this machine to a cluster.

    The machine's key is stored, so that the machine can rejoin without an invite. `share-compute service install` joins
    at each boot. Ctrl-C drains the machine: its part of a job first moves to the job's other machines. Pressing Ctrl-C
    twice ends the command at once.
    """
    from share_compute_api.agent.joining import default_name
    from share_compute_api.connection.transport import require_server_url

    os.umask(PRIVATE_UMASK)
    identities = own_identities()
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
    require_server_url(url, has_tls="." in (invite or ""))
    code = read_invite(invite, invite_file, identities, lending, command=f"share-compute join {url}")
    devices = lending.devices(code)
    try:
        if as_json:
            _lend(devices, JsonLines(), identities, name)
            return
        if not console.is_terminal:
            _lend(devices, ChangeLines(), identities, name)
            return
        views: dict[str, AgentStatus] = {}
        with Live(console=console, refresh_per_second=4) as live:

            def show(view: AgentStatus) -> None:
                views[view.name] = view
                live.update(Group(*map(agent_table, views.values())))

            _lend(devices, show, identities, name)
    except KeyboardInterrupt:
        return


def _lend(
    devices: Sequence[JoinOptions], report: Callable[[AgentStatus], None], identities: Identities, name: str
) -> None:
    from share_compute_api.agent.agent import Agent
    from share_compute_api.agent.host import Host

    if len(devices) == 1:
        Agent(devices[0], report, identities).run()
    elif status := Host(devices, report, identities, name).run():
        raise typer.Exit(status)


def own_identities() -> Identities:
    """Return the ids and keys with which this machine joined clusters, from this user's data folder."""
    from share_compute.settings import ClientSettings
    from share_compute_api.connection.identity import Identities

    return Identities(ClientSettings().data_folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lending:
    """Options of the commands with which a machine joins a cluster, as the user gave them."""

    url: str
    name: str
    device: Sequence[str]
    memory: str | None
    cpu_threads: int | None
    upload_limit: str | None
    download_limit: str | None
    label: Sequence[str]
    address: str | None
    fingerprint: str | None
    insecure: bool
    port_range: str
    leave_within: float

    def __post_init__(self) -> None:
        """Raise UserError if no machine may have the name."""
        from share_compute_api.agent.joining import check_name

        _parsed("--name", check_name, self.name)

    def arguments(self) -> list[str]:
        """Return the arguments of `share-compute join` with these options."""
        words = ["join", self.url, *(["--insecure"] if self.insecure else [])]
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in {"url", "insecure"} and value is not None:
                values = value if option.name in {"device", "label"} else [value]
                words += [word for one in values for word in (f"--{option.name.replace('_', '-')}", str(one))]
        return words

    def devices(self, invite: str | None) -> tuple[JoinOptions, ...]:
        """Return the join options of each lent device."""
        from share_compute.labels import parse_labels
        from share_compute_actors.machine import ports
        from share_compute_actors.machine.preflight import require_gpu_access
        from share_compute_actors.machine.sizes import parse_bytes, parse_rate
        from share_compute_api.agent.devices import lent_devices
        from share_compute_api.agent.joining import JoinOptions, split
        from share_compute_api.connection.fingerprints import parse_fingerprint, split_invite

        code, pin = split_invite(invite) if invite else (None, None)
        options = JoinOptions(
            url=self.url.rstrip("/"),
            invite=code,
            fingerprint=_parsed("--fingerprint", parse_fingerprint, self.fingerprint) or pin,
            is_insecure=self.insecure,
            name=self.name,
            memory_bytes=_parsed("--memory", parse_bytes, self.memory),
            cpu_threads=self.cpu_threads,
            upload_bytes_per_s=_parsed("--upload-limit", parse_rate, self.upload_limit),
            download_bytes_per_s=_parsed("--download-limit", parse_rate, self.download_limit),
            labels=_parsed("--label", parse_labels, self.label) or {},
            address=self.address,
            port_range=_parsed("--port-range", ports.PortRange.parse, self.port_range) or DEFAULT_RANGE,
            leave_within_s=self.leave_within,
        )
        devices = lent_devices(self.device)
        require_gpu_access([gpu for each in devices for gpu in each.gpus])
        return split(options, devices)


def _parsed(option: str, parse: Callable[[Given], Parsed], given: Given | None) -> Parsed | None:
    """Return the parsed value of an option, or None if it is not given; errors name the option."""
    with about_option(option):
        return parse(given) if given else None


def read_invite(
    given: str | None, file: Path | None, identities: Identities, lending: Lending, *, command: str
) -> str | None:
    """Return the given invite, or read one from a file or a prompt; remove the invite from the environment.

    A machine that has joined the server under its name needs no invite. Without ``given`` and ``file``, the result is
    then None.

    Args:
        given: the invite, if it was given as an option or a variable.
        file: file to read, ``-`` for standard input. Default: prompt on a terminal.
        identities: names under which this machine joined servers.
        lending: URL of the server, and name of the machine.
        command: command that needs the invite, for the hint.

    Raises:
        UserError: there is no invite and no terminal for a prompt, or the file is empty or cannot be read.
    """
    # Ray and its processes must not inherit the invite.
    os.environ.pop(INVITE_VARIABLE, None)
    url, name = lending.url, lending.name
    is_known = identities.of_host(url, name) is not None
    if not is_known and (others := identities.names(url)):
        Terminal(stderr=True, soft_wrap=True).print(
            f"This machine joined before as {listed(others)}; --name chooses that name again. As {name} it joins as "
            "another machine, with an invite of its own."
        )
    if given or (file is None and is_known):
        return given
    return _read_invite(file, lending, command)


def _read_invite(file: Path | None, lending: Lending, command: str) -> str:
    from share_compute.errors import UserError
    from share_compute_api.client.job_file import read_text

    if file is None and sys.stdin.isatty():
        console.print(
            "This machine needs an invite. The operator of the server makes one with [bold]share-compute invite[/]."
        )
        return str(typer.prompt(heading("Invite"), hide_input=True))
    if file is None:
        raise UserError(
            f"no invite is given, and this machine did not join {lending.url} as {lending.name} before",
            hint="ask the operator of the server, who makes an invite with share-compute invite; then run "
            f"{INVITE_VARIABLE}=CODE {command}",
        )
    text = sys.stdin.read() if str(file) == "-" else read_text(file, _MOST_BYTES)
    if not text.strip():
        raise UserError("the invite is empty", hint="ask the operator for one: share-compute invite")
    return text.strip()
