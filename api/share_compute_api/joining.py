"""Before a machine joins: what its owner lends, and whether it is fit."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import psutil

from share_compute.errors import ClockSkew, UserError
from share_compute_actors.preflight import check_clock, check_disk, check_memory, gpu_names, usable_threads
from share_compute_actors.run_folders import root_folder, sweep
from share_compute_api.agent_client import fetch_health
from share_compute_api.schemas import Limits
from share_compute_api.versions import check_versions, local_versions

_DEFAULT_SHARE = 0.5
"""Of the memory that is available now."""


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What the owner of a machine says; None stands for what is found there."""

    url: str
    invite: str = field(repr=False)
    name: str
    device: Literal["auto", "cpu", "cuda"] = "auto"
    memory_bytes: int | None = None
    cpu_threads: int | None = None
    gpus: int | None = None
    address: str | None = None
    """IP address that other members reach this machine at."""


def default_name() -> str:
    """Return a name made of the host name."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname().split(".")[0])
    return name.lstrip("_.-")[:63] or "machine"


def resolve_limits(options: JoinOptions) -> Limits:
    """Return what is lent, with what was left open filled in.

    Raises:
        UserError: more graphics processors are lent than there are.
        Unavailable: the driver of the graphics processors does not work.
    """
    found = 0 if options.device == "cpu" else len(gpu_names())
    gpus = found if options.gpus is None else options.gpus
    if gpus > found:
        raise UserError(
            f"{gpus} graphics processors are to be lent, but {found} are here",
            mend="lower --gpus" if found else "leave out --gpus, and see nvidia-smi",
        )
    if options.device == "cuda" and gpus == 0:
        raise UserError("--device cuda, but no NVIDIA graphics processor is here", mend="use --device cpu")
    memory = options.memory_bytes or int(psutil.virtual_memory().available * _DEFAULT_SHARE)
    threads = options.cpu_threads or usable_threads()
    return Limits(memory_bytes=memory, cpu_threads=threads, gpus=gpus, device=options.device)


def check_machine(options: JoinOptions, limits: Limits) -> None:
    """Check all that can be checked before the invite is used, and end what killed runs left here.

    Raises:
        UserError: too little disk or memory.
        Unavailable: the server does not answer.
        VersionMismatch: its versions and ours do not work together.
        ClockSkew: its clock and ours differ too much.
    """
    check_memory(limits.memory_bytes).require()
    check_disk(root_folder()).require()
    before = datetime.now(UTC)
    health = fetch_health(options.url)
    after = datetime.now(UTC)
    check_versions(health.versions, local_versions())
    middle = before + (after - before) / 2
    check_clock((middle - health.time).total_seconds()).require(ClockSkew)
    sweep()
