"""Measured times of layers: what the cost model takes instead of estimates, and how long they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import Field

from share_compute.strict import StrictModel
from share_compute.topology import BASE_DTYPE, Device, Topology

_MOST_CHANGE = 1.5
"""Two probes of one machine differ by less while nothing changed there; beyond it, what was timed is of the past."""


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """What a profiler measured of one layer on one machine, for one microbatch."""

    forward_s: float
    backward_s: float


Timings: TypeAlias = Mapping[str, Mapping[int, LayerTiming]]
"""By contributor id and layer; layer 0 with the embedding, the last with the head."""


class MachineTimings(StrictModel):
    """What was timed on one machine, and what it was timed under."""

    microbatch_size: int = Field(ge=1)
    """Samples in the microbatch that the times are of."""
    device: Device
    """What computed, as the probe had measured it."""
    layers: dict[int, LayerTiming]
    """By place in the whole model."""


def merged(
    kept: Mapping[str, MachineTimings], new: Mapping[str, MachineTimings]
) -> dict[str, MachineTimings]:
    """Return all that is known of each machine, by contributor id: what was kept, and over it what is new.

    What was kept of a machine is dropped when it was timed under something else.
    """
    return {**kept, **{machine: _over(kept.get(machine), timed) for machine, timed in new.items()}}


def _over(before: MachineTimings | None, new: MachineTimings) -> MachineTimings:
    if before is None or before.microbatch_size != new.microbatch_size:
        return new
    if not is_alike(before.device, new.device):
        return new
    return new.model_copy(update={"layers": {**before.layers, **new.layers}})


def holding(kept: Mapping[str, MachineTimings], topology: Topology, microbatch_size: int) -> Timings:
    """Return what still holds: of machines that are there and as fast as they were, for microbatches of this size.

    Args:
        kept: by contributor id; a machine that comes back has the id that it had.
        topology: the machines, as they are now.
        microbatch_size: in samples.
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
    """Return whether two probes can be of the same device in the same condition."""
    figures = (
        (one.flops_per_s.get(BASE_DTYPE, 0.0), other.flops_per_s.get(BASE_DTYPE, 0.0)),
        (one.memory_bytes_per_s, other.memory_bytes_per_s),
    )
    return (one.kind, one.name) == (other.kind, other.name) and all(
        max(pair) <= _MOST_CHANGE * min(pair) for pair in figures
    )
