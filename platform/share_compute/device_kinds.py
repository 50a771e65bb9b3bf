"""Kinds of devices that members compute on, and the facts about each kind that need no torch.

A new kind needs an entry in `KINDS`, operations in `share_compute.models.devices`, and a function in
``share_compute_actors.machine.preflight`` that lists the devices of a machine. All other code uses these three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

DeviceKind = Literal["cpu", "cuda", "mps"]


@dataclass(frozen=True, slots=True)
class KindFacts:
    """Properties that all devices of one kind have."""

    label: str
    """Name for people."""
    is_gpu: bool
    """Whether Ray counts the device as a GPU."""
    collectives: Literal["gloo", "nccl"]
    """Library that sums tensors of the members of a stage."""
    uses_main_memory: bool
    """Whether the device computes in the machine's main memory."""
    copies_sums: bool = False
    """Whether tensors are copied to the CPU, and sums back, because ``collectives`` cannot read the device's memory."""
    has_float64: bool = True
    """Whether the device can compute in float64."""


KINDS: Final[Mapping[DeviceKind, KindFacts]] = MappingProxyType(
    {
        "cpu": KindFacts("CPU", is_gpu=False, collectives="gloo", uses_main_memory=True),
        "cuda": KindFacts("NVIDIA GPU", is_gpu=True, collectives="nccl", uses_main_memory=False),
        "mps": KindFacts(
            "Apple GPU",
            is_gpu=True,
            collectives="gloo",
            uses_main_memory=True,
            copies_sums=True,
            has_float64=False,
        ),
    }
)
"""Facts about each kind of device."""
