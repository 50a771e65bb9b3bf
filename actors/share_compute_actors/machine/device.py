"""Finds the devices that a contributor computes on, verifies that they work and were measured, and connects them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from share_compute.device_kinds import KINDS, DeviceKind
from share_compute.errors import ContributorLost, ShareComputeError, first_line
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


def end_if_lost(kind: DeviceKind, end: Callable[[ShareComputeError], None], failure: BaseException) -> None:
    """Call ``end`` with ContributorLost if the device does not work any more after a failure of this process.

    Some errors of CUDA, such as an illegal memory access, make each later call of this process fail ("sticky" errors;
    CUDA's runtime API says at ``cudaErrorIllegalAddress`` that the process must be started again). After other errors,
    such as a lack of memory, the device works on.

    Args:
        kind: kind of the device; call this function on the thread that computes on it.
        end: ends this process.
        failure: the failure. Only errors of torch, and errors that they caused, make this function try the device.
    """
    torch_error = next(
        (each for each in (failure, failure.__cause__) if isinstance(each, RuntimeError)), None
    )
    if torch_error is None:
        return
    try:
        OPERATIONS[kind].check()
    except Exception:  # noqa: BLE001 - the device does not work, whatever the error
        end(
            ContributorLost(
                f"the {KINDS[kind].label} of this member stopped working: {first_line(torch_error)}",
                hint="no action needed: the work continues without this member, and a new process replaces it; if it"
                " happens again, look for a token or label outside its table, and for errors of the device in the"
                " machine's system log",
                details={"ends_member": True},
            )
        )


def join_process_group(
    kind: DeviceKind, rank: int, count: int, folder: Path, deadline_s: float, *, spans_hosts: bool = False
) -> None:
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
        spans_hosts: whether the process may later join groups with other hosts. NCCL chooses its network device once in
            a process. It then chooses as if there were only those groups, and not the loopback device.
    """
    collectives = KINDS[kind].collectives
    # The group listens at the loopback device only.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    variables = ("GLOO_SOCKET_IFNAME",) if spans_hosts else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
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
    """Leave torch's default process group, if there is one, after the others have ended, even during a sum."""
    group = distributed.group.WORLD
    if group is None:
        return
    group.abort()  # otherwise NCCL would wait until its kernels end, and these wait for the processes that ended
    distributed.destroy_process_group()
