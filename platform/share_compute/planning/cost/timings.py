"""Measured times of layers, and the conditions under which they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import Field

from share_compute.files.strict import StrictModel
from share_compute.topology import BASE_DTYPE, Device, Topology

_MOST_CHANGE = 1.5
"""Maximum ratio between the figures of two probes of an unchanged device."""


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """Measured times of one layer on one machine, for one microbatch."""

    forward_s: float
    backward_s: float


Timings: TypeAlias = Mapping[str, Mapping[int, LayerTiming]]
"""Timings by contributor id and layer; layer 0 includes the embedding, the last layer includes the head."""


class MachineTimings(StrictModel):
    """Timings of one machine, with the microbatch size and the device for which they are valid."""

    microbatch_size: int = Field(ge=1)
    """Samples in the timed microbatch."""
    device: Device
    """Device that computed the layers, with the figures of its probe."""
    layers: dict[int, LayerTiming]
    """Timings by layer index in the whole model."""


def merged(
    kept: Mapping[str, MachineTimings], new: Mapping[str, MachineTimings]
) -> dict[str, MachineTimings]:
    """Return the kept timings, updated with the new ones, by contributor id.

    A new timing replaces the kept timing of the same layer. All kept timings of a machine are dropped if its new
    timings were taken with another microbatch size, or if its device has changed (see `is_alike`).
    """
    return {**kept, **{machine: _over(kept.get(machine), timed) for machine, timed in new.items()}}


def _over(before: MachineTimings | None, new: MachineTimings) -> MachineTimings:
    if before is None or before.microbatch_size != new.microbatch_size:
        return new
    if not is_alike(before.device, new.device):
        return new
    return new.model_copy(update={"layers": {**before.layers, **new.layers}})


def holding(kept: Mapping[str, MachineTimings], topology: Topology, microbatch_size: int) -> Timings:
    """Return the timings with this microbatch size, for machines that are in the topology and have not changed.

    Args:
        kept: timings by contributor id.
        topology: the machines, as they are now.
        microbatch_size: samples in one microbatch.
    """
    return {
        machine.id: timed.layers
        for machine in topology.contributors
        if (timed := kept.get(machine.id)) is not None
        and timed.microbatch_size == microbatch_size
        and machine.devices
        and is_alike(timed.device, machine.device)
    }


def is_alike(one: Device, other: Device) -> bool:
    """Return whether two probes found the same kind and name of device, and similar speeds.

    Float32 speeds and memory bandwidths are similar if their ratio is at most `_MOST_CHANGE`.
    """
    figures = (
        (one.flops_per_s.get(BASE_DTYPE, 0.0), other.flops_per_s.get(BASE_DTYPE, 0.0)),
        (one.memory_bytes_per_s, other.memory_bytes_per_s),
    )
    return (one.kind, one.name) == (other.kind, other.name) and all(
        max(pair) <= _MOST_CHANGE * min(pair) for pair in figures
    )
