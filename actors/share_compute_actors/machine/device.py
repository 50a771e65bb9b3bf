"""Finds the device that a contributor computes on, verifies that it was measured, and waits for its work."""

from __future__ import annotations

import os

import torch

from share_compute.errors import ContributorLost
from share_compute.topology import DeviceKind


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU in the form that torch reports."""
    return str(torch.cuda.get_device_properties(device).uuid)


def measured_device(kind: DeviceKind, uuid: str) -> torch.device:
    """Return the device that a member computes on.

    Args:
        kind: kind of the measured device.
        uuid: UUID of the measured device; empty if it is not known.

    Raises:
        ContributorLost: this process sees no GPU, or a different GPU from the one that was measured.
    """
    device = torch.device(kind)
    if kind == "cpu" or not uuid:
        return device
    found = f"GPU {gpu_uuid(device)}" if torch.cuda.is_available() else "no GPU"
    if found != f"GPU {uuid}":
        raise ContributorLost(
            f"GPU {uuid} was measured, but members of this contributor see {found}",
            hint="end its `share-compute join` and start it again, so that it is measured again",
        )
    return device


def finish(device: torch.device) -> None:
    """Wait until a GPU has done all work that was enqueued on it; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compute_deterministically(device: torch.device) -> None:
    """Make this process get the same bits in every run of an operation on a GPU; a CPU needs no setting.

    Without this, for example, the backward pass of attention adds in an order that varies. Operations that have no
    deterministic algorithm raise a RuntimeError from now on. A warning instead of the error is no choice: torch's
    kernels of attention then stay nondeterministic.
    """
    if device.type != "cuda":
        return
    # cuBLAS reads this variable when its first handle is made. The value is one of the two that torch accepts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    # Filling new tensors would take time, and all of them are written before they are read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
