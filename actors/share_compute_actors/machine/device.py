"""Finds the device that a contributor computes on, and verifies that it was measured."""

from __future__ import annotations

import torch

from share_compute.device_kinds import DeviceKind
from share_compute.errors import ContributorLost
from share_compute.models.devices import OPERATIONS


def measured_device(kind: DeviceKind, uuid: str) -> torch.device:
    """Return the device that a member computes on.

    Args:
        kind: kind of the measured device.
        uuid: UUID of the measured device; empty if it is not known, or devices of the kind have none.

    Raises:
        ContributorLost: this process sees no GPU, or a different GPU from the one that was measured.
    """
    operations = OPERATIONS[kind]
    if not operations.facts.is_gpu:
        return operations.device
    found = f"GPU {operations.uuid() or operations.facts.label}" if operations.count() else "no GPU"
    if found == "no GPU" or (uuid and found != f"GPU {uuid}"):
        raise ContributorLost(
            f"GPU {uuid or operations.facts.label} was measured, but members of this contributor see {found}",
            hint="end its `share-compute join` and start it again, so that it is measured again",
        )
    return operations.device
