"""Finds the device that a contributor computes on, and verifies that this device was measured."""

from __future__ import annotations

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
