"""What ``share-compute doctor`` looks at: this machine, this installation, and a server if there is one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError

import psutil

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.settings import Settings
from share_compute_actors.preflight import (
    LEAST_MEMORY_BYTES,
    Finding,
    check_clock,
    check_disk,
    check_gpus,
    format_bytes,
)
from share_compute_actors.run_folders import abandoned, root_folder
from share_compute_api.agent_client import fetch_health
from share_compute_api.discovery import find_target
from share_compute_api.versions import check_versions, local_versions


def examine(settings: Settings, url: str | None = None) -> Iterator[Finding]:
    """Give one finding for each check, as each is done.

    Args:
        settings: of the server that runs, or is to run, on this machine.
        url: of a server elsewhere; default: the one of this machine, if it runs.
    """
    yield _versions()
    yield _memory()
    yield check_disk(settings.data_folder)
    yield _temporary_folder()
    yield check_gpus()
    yield _leftovers()
    server = url or _local_server()
    if server is None:
        yield _port("port", settings.host, settings.port)
        if settings.ray_port:
            yield _port("ray port", "", settings.ray_port)
        yield Finding("server", "ok", "none runs on this machine")
    else:
        yield from _server(server)


def _versions() -> Finding:
    try:
        found = local_versions()
    except PackageNotFoundError as failure:
        return Finding(
            "versions", "fail", f"{failure.name} is not installed", mend=f"pip install {failure.name}"
        )
    return Finding("versions", "ok", ", ".join(f"{name} {text}" for name, text in found))


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    text = f"{format_bytes(available)} of memory available"
    if available >= 2 * LEAST_MEMORY_BYTES:
        return Finding("memory", "ok", text)
    mend = "end other programs"
    return Finding("memory", "fail" if available < LEAST_MEMORY_BYTES else "warn", text, mend=mend)


def _temporary_folder() -> Finding:
    try:
        return Finding("temporary folder", "ok", str(root_folder()))
    except ShareComputeError as failure:
        return Finding("temporary folder", "fail", failure.message, mend=failure.mend)
    except OSError as failure:
        return Finding(
            "temporary folder", "fail", f"cannot be written: {failure}", mend="set TMPDIR to one that can"
        )


def _leftovers() -> Finding:
    left = list(abandoned())
    running = sum(len(roster.leftovers()) for roster in left)
    if not left:
        return Finding("leftovers", "ok", "nothing is left of runs that were killed")
    return Finding(
        "leftovers",
        "warn",
        f"{running} processes and {len(left)} folders are left of runs that were killed",
        mend="the next `share-compute up` or `join` ends them; or share-compute doctor --clean",
        details={"folders": [str(roster.folder) for roster in left]},
    )


def _port(check: str, host: str, port: int) -> Finding:
    if port == 0:
        return Finding(check, "ok", "a free one is picked")
    try:
        socket.create_server((host, port)).close()
    except OSError as failure:
        mend = "end what uses it, or set another one"
        return Finding(check, "fail", f"cannot listen on {host} {port}: {failure.strerror}", mend=mend)
    return Finding(check, "ok", f"{port} is free")


def _local_server() -> str | None:
    try:
        return find_target().url
    except Unavailable:
        return None


def _server(url: str) -> Iterator[Finding]:
    before = datetime.now(UTC)
    try:
        health = fetch_health(url)
    except ShareComputeError as failure:
        yield Finding("server", "fail", failure.message, mend=failure.mend)
        return
    after = datetime.now(UTC)
    yield Finding("server", "ok", f"{url} answers in {(after - before).total_seconds() * 1000:.0f} ms")
    try:
        check_versions(health.versions, local_versions())
    except ShareComputeError as failure:
        yield Finding("server's versions", "fail", failure.message, mend=failure.mend)
    else:
        yield Finding("server's versions", "ok", "fit ours")
    middle = before + (after - before) / 2
    yield check_clock((middle - health.time).total_seconds())
