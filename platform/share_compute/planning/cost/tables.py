"""Common parts of the cost models of training and serving: machines, memory, and the time of layers.

The estimated time of a layer on a machine is ::

    max(FLOPs / measured FLOP/s, bytes moved / measured memory bandwidth) + operations * measured overhead of one

If a profiler timed the layer on the machine, the measured time replaces the estimate. Estimates of the machine's other
layers are multiplied by the ratio of its measured to its estimated times. For machines without timed layers, the factor
is the median ratio of timed machines with the same kind of device, or else of all timed machines. Without this factor,
a machine could look faster than timed machines merely because it was not timed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

import numpy as np

from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.cost.timings import Timings
from share_compute.planning.network.network import Floats, Network
from share_compute.specification.workload import Workload
from share_compute.topology import Topology

MEMORY_SHARE = 0.9
"""Share of the lent memory that a plan may fill. The cost model does not include all memory of a process."""


@dataclass(frozen=True, eq=False)
class CostTables:
    """Tables of one job on one topology.

    Args:
        profile: cost profile of the model.
        topology: the machines.
        network: links between the machines.
        workload: the training steps or the requests.
        timings: measured times of layers, used as the module docstring describes.
    """

    profile: ModelProfile
    topology: Topology
    network: Network
    workload: Workload
    timings: Timings = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.profile.layers)

    @property
    def num_machines(self) -> int:
        """Number of machines of the topology."""
        return len(self.topology.contributors)

    def part(self, machines: Sequence[int]) -> Self:
        """Return the tables of the job on some of the machines, renumbered in the given order."""
        contributors = self.topology.contributors
        return replace(
            self,
            topology=Topology(tuple(contributors[machine] for machine in machines)),
            network=replace(self.network, region=self.network.region[list(machines)]),
        )

    @cached_property
    def memory_bytes(self) -> Floats:
        """Bytes that a plan may fill on each machine ``[machines]``."""
        lent = [machine.memory_bytes for machine in self.topology.contributors]
        return MEMORY_SHARE * np.array(lent, dtype=np.float64)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of device of each machine; "" without a device."""
        return tuple(machine.device.kind if machine.devices else "" for machine in self.topology.contributors)

    @cached_property
    def host_threads(self) -> Mapping[str, int]:
        """Number of threads of each host whose CPU machines together use more threads than the host has."""
        wanted: dict[str, int] = defaultdict(int)
        found: dict[str, int] = {}
        for kind, machine in zip(self.kinds, self.topology.contributors, strict=True):
            if kind == "cpu" and machine.host and machine.host_threads:
                wanted[machine.host] += machine.threads
                found[machine.host] = max(machine.host_threads, found.get(machine.host, 0))
        return {host: threads for host, threads in found.items() if wanted[host] > threads}

    @cached_property
    def memory_bytes_per_s(self) -> Floats:
        """Memory bandwidth of each machine in bytes/s ``[machines]``; infinite where none was measured."""
        rates = np.array([machine.memory_bytes_per_s for machine in self.topology.contributors], np.float64)
        return np.where((rates > 0) & np.isfinite(rates), rates, np.inf)

    @cached_property
    def overhead_s(self) -> Floats:
        """Seconds of overhead of one operation on each machine ``[machines]``; 0 where it was not measured."""
        return np.array([machine.overhead_s for machine in self.topology.contributors], dtype=np.float64)

    @cached_property
    def _flops_per_s(self) -> Floats:
        """FLOP/s of each machine ``[machines]``: in the job's dtype, or else in float32; 0 if neither was measured."""
        dtype, machines = self.workload.dtype, self.topology.contributors
        speeds = np.array(
            [machine.flops_per_s(dtype) or machine.flops_per_s() for machine in machines], np.float64
        )
        return np.where((speeds > 0) & np.isfinite(speeds), speeds, 0.0)

    def estimated_s(self, flops: Floats, moved_bytes: Floats, operations: Floats) -> Floats:
        """Return each layer's estimated seconds on each machine ``[machines, layers]``; infinite for unknown speeds.

        Args:
            flops: floating point operations of each layer ``[layers]``.
            moved_bytes: bytes that each layer reads from memory ``[layers]``.
            operations: calls of kernels in each layer ``[layers]``.
        """
        speed = self._flops_per_s[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.maximum(flops / speed, moved_bytes / self.memory_bytes_per_s[:, None])
        return np.where(speed > 0, times + operations * self.overhead_s[:, None], np.inf)

    def exchanged_s(self, sums: Floats, tensor_bytes: Floats) -> Floats:
        """Return the seconds in which the devices of each machine sum tensors of each layer ``[machines, layers]``.

        The time is 0 on machines whose members compute on one device, and on machines without a measured link between
        devices.

        Args:
            sums: sums of each layer ``[layers]``.
            tensor_bytes: size of one tensor of each layer ``[layers]``.
        """
        found = np.zeros((self.num_machines, self.num_layers))
        for row, machine in enumerate(self.topology.contributors):
            if len(machine.used) > 1:
                device = machine.device
                found[row] = sums * device.peer_latency_s
                if device.peer_bytes_per_s > 0:
                    found[row] += sums * tensor_bytes / device.peer_bytes_per_s
        return found

    def timed(self, way: Literal["forward", "backward"]) -> list[dict[int, float]]:
        """Return, for each machine, its measured forward or backward seconds by layer."""
        return [
            {layer: getattr(timing, f"{way}_s") for layer, timing in self.timings.get(machine.id, {}).items()}
            for machine in self.topology.contributors
        ]

    def corrections(self, estimated_s: Floats, timed: Sequence[Mapping[int, float]]) -> Floats:
        """Return the correction factor for the estimates of each machine ``[machines, 1]``.

        Args:
            estimated_s: estimated seconds of each layer ``[machines, layers]``.
            timed: each machine's measured seconds by layer.
        """
        own = np.ones(self.num_machines)
        known: dict[str, list[float]] = {}
        for row, layers in enumerate(timed):
            guessed = float(estimated_s[row, list(layers)].sum()) if layers else 0.0
            if 0 < guessed < math.inf:
                own[row] = sum(layers.values()) / guessed
                known.setdefault(self.kinds[row], []).append(own[row])
        every = [factor for factors in known.values() for factor in factors]
        for row, layers in enumerate(timed):
            if not layers and every:
                own[row] = float(np.median(known.get(self.kinds[row], every)))
        return own[:, None]

    def corrected_s(self, estimated_s: Floats, timed: Sequence[Mapping[int, float]]) -> Floats:
        """Return the measured or corrected seconds of the first l layers on each machine ``[machines, layers + 1]``.

        Args:
            estimated_s: estimated seconds of each layer ``[machines, layers]``.
            timed: each machine's measured seconds by layer.
        """
        times = estimated_s * self.corrections(estimated_s, timed)
        for row, layers in enumerate(timed):
            times[row, list(layers)] = list(layers.values())
        return sums(times)


def sums(values: Floats) -> Floats:
    """Return prefix sums along the last axis, beginning with 0; shape ``[..., layers + 1]``."""
    totals = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=totals[..., 1:])
    return totals
