"""Checks of ``share-compute doctor``: this machine, this installation, and a server if there is one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from tempfile import TemporaryFile

import psutil

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.quantities import bytes_text
from share_compute.settings import Settings
from share_compute_actors.machine.ports import LEAST_FREE_PORTS, PortRange
from share_compute_actors.machine.preflight import (
    LEAST_MEMORY_BYTES,
    CheckResult,
    check_clock,
    check_compiler,
    check_devices,
    check_disk,
    check_head,
    check_resolver,
    check_walls,
)
from share_compute_actors.machine.run_folders import abandoned, root_folder
from share_compute_api.agent.client import probe_server
from share_compute_api.connection.discovery import Target, find_target
from share_compute_api.connection.transport import Transport
from share_compute_api.schemas.bodies import Status
from share_compute_api.schemas.versions import check_versions, local_versions


def examine(settings: Settings, url: str | None = None) -> Iterator[CheckResult]:
    """Run the checks one by one, and yield the findings of each check when it is done.

    Args:
        settings: settings of the server that runs, or will run, on this machine.
        url: URL of a server; default: the server in the client settings, else the one that runs on this machine.
    """
    yield _versions()
    yield _memory()
    yield check_disk(settings.data_folder)
    yield _temporary_folder()
    yield check_devices()
    yield check_compiler()
    yield check_resolver()
    yield check_walls()
    yield _leftovers()
    yield _node_ports(settings)
    server = _target(url)
    if server is None:
        yield _port("port", settings.host, settings.port)
        if settings.ray_port:
            yield _port("ray port", "", settings.ray_port)
        yield CheckResult("server", "ok", "none runs on this machine")
    else:
        yield from _server(server)


def _versions() -> CheckResult:
    try:
        found = local_versions()
    except PackageNotFoundError as failure:
        return CheckResult(
            "versions", "fail", f"{failure.name} is not installed", hint=f"pip install {failure.name}"
        )
    return CheckResult("versions", "ok", ", ".join(f"{name} {text}" for name, text in found))


def _memory() -> CheckResult:
    available = psutil.virtual_memory().available
    text = f"{bytes_text(available)} of memory available"
    if available >= 2 * LEAST_MEMORY_BYTES:
        return CheckResult("memory", "ok", text)
    hint = "end other programs"
    return CheckResult("memory", "fail" if available < LEAST_MEMORY_BYTES else "warn", text, hint=hint)


def _temporary_folder() -> CheckResult:
    try:
        root = root_folder()
        with TemporaryFile(dir=root):
            return CheckResult("temporary folder", "ok", str(root))
    except ShareComputeError as failure:
        return CheckResult("temporary folder", "fail", failure.message, hint=failure.hint)
    except OSError as failure:
        hint = "free some disk space, or set TMPDIR to a folder of your own, with a short path"
        return CheckResult("temporary folder", "fail", f"cannot be written: {failure}", hint=hint)


def _leftovers() -> CheckResult:
    try:
        left = {str(children.folder): len(children.leftovers()) for children in abandoned()}
    except ShareComputeError as failure:
        return CheckResult("leftovers", "warn", failure.message, hint=failure.hint)
    if not left:
        return CheckResult("leftovers", "ok", "nothing is left of runs that were killed")
    return CheckResult(
        "leftovers",
        "warn",
        f"{sum(left.values())} processes and {len(left)} folders are left of runs that were killed",
        hint="share-compute doctor --clean ends them; so does the next `share-compute join`",
        details={"folders": list(left)},
    )


def _node_ports(settings: Settings) -> CheckResult:
    try:
        within = PortRange.parse(settings.port_range)
        free = within.free()
    except ShareComputeError as failure:
        return CheckResult("node ports", "fail", failure.message, hint=failure.hint)
    text = f"Ray nodes started here use TCP {within}, and {free} of these ports are free; open them between machines"
    if free >= LEAST_FREE_PORTS:
        return CheckResult("node ports", "ok", text)
    hint = "end what uses them, or choose other ports with --port-range (SHARE_COMPUTE_PORT_RANGE)"
    return CheckResult("node ports", "warn", text, hint=hint)


def _port(check: str, host: str, port: int) -> CheckResult:
    if port == 0:
        return CheckResult(check, "ok", "a free one is picked")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as failure:
        hint = "end what uses it, or set another one"
        return CheckResult(check, "fail", f"cannot listen on {host} {port}: {failure.strerror}", hint=hint)
    return CheckResult(check, "ok", f"{port} is free")


def _target(url: str | None) -> Target | None:
    try:
        return find_target(url)
    except Unavailable:
        return None


def _server(target: Target) -> Iterator[CheckResult]:
    url = target.url
    try:
        probe = probe_server(url, target.fingerprint)
    except ShareComputeError as failure:
        yield CheckResult("server", "fail", failure.message, hint=failure.hint)
        return
    yield CheckResult("server", "ok", f"{url} answers in {probe.round_trip_s * 1000:.0f} ms")
    yield check_clock(probe.skew_s)
    if target.api_key is None:
        text = "not compared: only holders of an API key, or of an invite when they join, can read them"
        yield CheckResult("server's versions", "ok", text)
        return
    try:
        with Transport(target) as transport:
            status = transport.read(Status, "GET", "/status")
        check_versions(status.versions, local_versions())
    except ShareComputeError as failure:
        yield CheckResult("server's versions", "fail", failure.message, hint=failure.hint)
        return
    yield CheckResult("server's versions", "ok", "fit ours")
    if status.ray_address is not None:
        yield check_head(status.ray_address)
