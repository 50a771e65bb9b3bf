"""Finds the devices that a contributor computes on, verifies that they were measured, and connects them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from share_compute.device_kinds import KINDS, DeviceKind
from share_compute.errors import ContributorLost
from share_compute.models.devices import OPERATIONS
from share_compute_actors.machine.cores import restrict_thread, share_cores


def measured_device(kind: DeviceKind, uuids: Sequence[str], lent: int = 1) -> torch.device:
    """Return the device that a member computes on; call this on the thread that will compute.

    If parts of a CPU are lent together, the calling thread is restricted to the processors of the first part.

    Args:
        kind: kind of the measured devices.
        uuids: UUIDs of the measured devices, one for each rank; each is empty if unknown, or if devices of this
            kind have none.
        lent: number of devices that are lent together.

    Raises:
        ContributorLost: this process sees fewer GPUs, or different GPUs from those that were measured.
    """
    operations = OPERATIONS[kind]
    if not operations.facts.is_gpu:
        if lent > 1:
            restrict_thread(share_cores(lent)[0])
        return operations.device
    count = operations.count()
    for place, uuid in enumerate(uuids):
        own = operations.uuid(place) if place < count else ""
        found = f"GPU {own or operations.facts.label}" if place < count else "no GPU"
        if place >= count or (uuid and own != uuid):
            raise ContributorLost(
                f"GPU {uuid or operations.facts.label} was measured, but members of this contributor see {found}",
                hint="end its `share-compute join` and start it again, so that it is measured again",
            )
    return operations.device


def join_process_group(kind: DeviceKind, rank: int, count: int, folder: Path, deadline_s: float) -> None:
    """Join the processes of this machine that meet in a folder, in torch's default process group.

    The group is connected when this function returns. By default, NCCL would connect in the first sum, after the
    variables that name the network device have gone.

    Args:
        kind: kind of the devices, which determines the library that sums tensors.
        rank: number of this process.
        count: number of processes.
        folder: an empty folder, which all processes can read and write. With NCCL it must stay until each of them has
            left the group, because a thread of NCCL reads it every second.
        deadline_s: longest wait for another process, in seconds. NCCL waits without a deadline while it connects.
    """
    collectives = KINDS[kind].collectives
    # The group listens at the loopback device only.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(dict.fromkeys(variables, loopback))
    try:
        distributed.init_process_group(
            collectives,
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=deadline_s),
            device_id=OPERATIONS[kind].current() if collectives == "nccl" else None,
        )
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def leave_process_group() -> None:
    """Leave torch's default process group after the other processes have ended, even during a sum."""
    group = distributed.group.WORLD
    assert group is not None
    group.abort()  # otherwise NCCL would wait until its kernels end, and these wait for the processes that ended
    distributed.destroy_process_group()
