"""Prepares a join: options of the machine's owner, resources to lend, and checks of the machine."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psutil
from pydantic import TypeAdapter, ValidationError

from share_compute.errors import ClockSkew, Unavailable, UntrustedCertificate, UserError
from share_compute.files.problem_words import problem_text
from share_compute.quantities import rate_text
from share_compute.rate_limit import LEAST_BYTES_PER_S
from share_compute_actors.machine.ports import DEFAULT_RANGE, PortRange
from share_compute_actors.machine.preflight import (
    check_clock,
    check_compiler,
    check_disk,
    check_head,
    check_listening,
    check_memory,
    check_resolver,
    check_walls,
    host_id,
    route_address,
    usable_threads,
)
from share_compute_actors.machine.run_folders import root_folder, sweep
from share_compute_api.agent.client import probe_server
from share_compute_api.agent.devices import LentDevice
from share_compute_api.connection.fingerprints import WHOLE_INVITE
from share_compute_api.connection.private import require_private_url
from share_compute_api.schemas.agents import MachineLimits, MachineName

_DEFAULT_SHARE = 0.5
"""Share of the available memory that is lent by default."""


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """Options of a machine's owner; for memory, threads and address, None means a value taken from the machine."""

    url: str
    invite: str | None = field(repr=False)
    """Invite to join with; None to use a stored key of this device or of another device of this host."""
    name: str
    device: LentDevice = field(default_factory=LentDevice)
    memory_bytes: int | None = None
    cpu_threads: int | None = None
    upload_bytes_per_s: int | None = None
    """Rate at which the machine may send, in bytes/s; None for no limit."""
    download_bytes_per_s: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the machine."""
    address: str | None = None
    """IP address at which other machines reach this machine."""
    fingerprint: str | None = None
    """Fingerprint of the server's key; None to verify the certificate with public authorities."""
    is_insecure: bool = False
    """Whether the cluster's token may be received over plain HTTP from another machine."""
    port_range: PortRange = DEFAULT_RANGE
    """TCP ports of the machine's Ray node, which a firewall must allow."""
    leave_within_s: float = 60.0
    """Time limit for moving a job's shards to other machines before this machine leaves, in seconds."""


def default_name() -> str:
    """Return a valid machine name made from the host name."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname().split(".")[0])
    return name.lstrip("_.-")[:63] or "machine"


def check_name(name: str) -> str:
    """Return a machine's name, or raise UserError if no machine may have it."""
    try:
        return TypeAdapter(MachineName).validate_python(name)
    except ValidationError as failure:
        problem = problem_text(failure.errors()[0])
        raise UserError(f"{name!r}: {problem}", hint="choose a name such as ada-laptop") from failure


def resolve_limits(options: JoinOptions) -> MachineLimits:
    """Return the resources that are lent; values missing in the options are taken from the machine.

    Raises:
        UserError: the options lend more threads than the machine has, or fewer threads than parts of the CPU.
    """
    memory = options.memory_bytes or int(psutil.virtual_memory().available * _DEFAULT_SHARE)
    threads = options.cpu_threads or usable_threads()
    if threads > usable_threads():
        raise UserError(
            f"cannot lend {threads} threads: this machine has {usable_threads()}",
            hint=f"use --cpu-threads {usable_threads()} or less",
        )
    device, count = options.device, len(options.device.names)
    if device.kind == "cpu" and threads < count:
        raise UserError(
            f"{device.name} are {count} parts of the CPU, but only {threads} of its threads are lent",
            hint=f"lend {count} threads or more with --cpu-threads, or fewer parts",
        )
    return MachineLimits(
        memory_bytes=memory,
        cpu_threads=threads,
        device=device.kind,
        devices=count,
        gpus=device.gpus,
        host_id=host_id(),
        host_threads=usable_threads(),
        upload_bytes_per_s=options.upload_bytes_per_s,
        download_bytes_per_s=options.download_bytes_per_s,
        labels=dict(options.labels),
    )


def split(options: JoinOptions, devices: Sequence[LentDevice]) -> tuple[JoinOptions, ...]:
    """Return the options of each contributor: memory, threads and rates are divided evenly among all devices.

    Devices that are lent together are one contributor. Each contributor gets its own name. If there is only one, its
    name, memory, threads and rates are not changed.

    Raises:
        UserError: the machine has too few threads or too little memory, or too little memory is lent, or a rate is too
            low for this many devices, or a name is too long.
    """
    if len(devices) == 1:
        return (replace(options, device=devices[0]),)
    limits = resolve_limits(options)
    check_memory(limits.memory_bytes).require()
    total = sum(len(device.names) for device in devices)
    return tuple(
        replace(
            options,
            name=check_name(f"{options.name}.{device.suffix}"),
            device=device,
            memory_bytes=limits.memory_bytes // total * len(device.names),
            cpu_threads=max(1, limits.cpu_threads // total) * len(device.names),
            upload_bytes_per_s=_part(options.upload_bytes_per_s, total, len(device.names)),
            download_bytes_per_s=_part(options.download_bytes_per_s, total, len(device.names)),
        )
        for device in devices
    )


def _part(bytes_per_s: int | None, devices: int, own: int) -> int | None:
    """Return the part of a rate for ``own`` of all ``devices``."""
    if bytes_per_s is None:
        return None
    if bytes_per_s // devices < LEAST_BYTES_PER_S:
        least = rate_text(devices * LEAST_BYTES_PER_S)
        raise UserError(
            f"a rate of {rate_text(bytes_per_s)} is too low for {devices} devices",
            hint=f"allow at least {least}, or lend fewer devices",
        )
    return bytes_per_s // devices * own


def check_machine(
    options: JoinOptions, limits: MachineLimits, find_head: Callable[[], str]
) -> tuple[str, ...]:
    """Check this machine and its connection to the server before it joins; end processes that killed runs left.

    Args:
        options: options of the machine's owner.
        limits: resources that are lent.
        find_head: returns host:port of the Ray head; may have to join the cluster to get it.

    Returns:
        Warnings for the owner.

    Raises:
        InsecureTransport: the URL is plain HTTP to another machine, and ``is_insecure`` is not set.
        UserError: there is too little disk space or memory, or the address is not this machine's.
        UntrustedCertificate: the server's certificate is not trusted.
        Unavailable: the server or its Ray head cannot be reached.
        ClockSkew: the clocks of the server and this machine differ too much.
    """
    if not options.is_insecure:
        require_private_url(options.url)
    check_memory(limits.memory_bytes).require()
    check_disk(root_folder()).require()
    try:
        probe = probe_server(options.url, options.fingerprint)
    except UntrustedCertificate as untrusted:
        if options.invite is None:
            raise
        raise UntrustedCertificate(
            f"{untrusted.message}; the invite has no fingerprint",
            hint=f"{WHOLE_INVITE}; if it printed none, {untrusted.hint}",
        ) from untrusted
    check_clock(probe.skew_s).require(ClockSkew)
    ray_address = find_head()
    check_head(ray_address).require(Unavailable)
    target = ray_address.rpartition(":")[0].strip("[]")
    check_listening(options.address or route_address(target)).require()
    sweep()
    found = (check_resolver(), check_walls(), check_compiler())
    return tuple(f"{one.text}; {one.hint}" for one in found if one.state == "warn")
