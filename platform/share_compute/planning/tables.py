"""What the cost models of training and of serving share: machines, memory, the time of layers, its correction.

The estimated time of a layer on a machine is ::

    max(FLOPs / measured FLOP/s, bytes moved / measured memory bandwidth) + operations * measured overhead of one

A layer that a profiler timed there takes that time instead. Layers of the machine that were not timed are scaled by
what its timed ones took against their estimates, and machines without timed layers by the median of those of their
kind, or of all: what was measured must not make a machine look fast only because nobody looked.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

import numpy as np

from share_compute.planning.network import Floats, Network
from share_compute.planning.profile import ModelProfile
from share_compute.planning.timings import Timings
from share_compute.planning.workload import Workload
from share_compute.topology import Topology

MEMORY_SHARE = 0.9
"""Of the lent memory, how much a plan may fill: the rest is for the process and for what the model does not know."""


@dataclass(frozen=True, eq=False)
class CostTables:
    """One job on one topology, as tables.

    Args:
        profile: the model.
        topology: the machines.
        network: their links.
        workload: what the model is used for.
        timings: measured times, which replace and correct estimates.
    """

    profile: ModelProfile
    topology: Topology
    network: Network
    workload: Workload
    timings: Timings = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.profile.layers)

    @property
    def num_machines(self) -> int:
        """Machines of the topology."""
        return len(self.topology.contributors)

    def part(self, machines: Sequence[int]) -> Self:
        """Return the same on some of the machines, numbered anew in the order given."""
        contributors = self.topology.contributors
        return replace(
            self,
            topology=Topology(tuple(contributors[machine] for machine in machines)),
            network=replace(self.network, region=self.network.region[list(machines)]),
        )

    @cached_property
    def memory_bytes(self) -> Floats:
        """What a plan may fill of each machine ``[machines]``."""
        lent = [machine.memory_bytes for machine in self.topology.contributors]
        return MEMORY_SHARE * np.array(lent, dtype=np.float64)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of device of each machine: the members of a pool sum gradients, which takes devices of one kind."""
        return tuple(machine.device.kind if machine.devices else "" for machine in self.topology.contributors)

    @cached_property
    def host_threads(self) -> Mapping[str, int]:
        """Threads of each host on which the CPUs of several machines want more than there are, by host."""
        wanted: dict[str, int] = defaultdict(int)
        found: dict[str, int] = {}
        for kind, machine in zip(self.kinds, self.topology.contributors, strict=True):
            if kind == "cpu" and machine.host and machine.host_threads:
                wanted[machine.host] += machine.cpu_threads
                found[machine.host] = max(machine.host_threads, found.get(machine.host, 0))
        return {host: threads for host, threads in found.items() if wanted[host] > threads}

    @cached_property
    def memory_bytes_per_s(self) -> Floats:
        """Memory bandwidth of each machine ``[machines]``; infinite where none was measured."""
        rates = np.array([machine.memory_bytes_per_s for machine in self.topology.contributors], np.float64)
        return np.where((rates > 0) & np.isfinite(rates), rates, np.inf)

    @cached_property
    def overhead_s(self) -> Floats:
        """What one small operation takes on each machine ``[machines]``; 0 where it was not measured."""
        return np.array([machine.overhead_s for machine in self.topology.contributors], dtype=np.float64)

    @cached_property
    def _flops_per_s(self) -> Floats:
        """Speed of each machine in what the job computes in ``[machines]``; 0 where none was measured."""
        dtype, machines = self.workload.dtype, self.topology.contributors
        speeds = np.array(
            [machine.flops_per_s(dtype) or machine.flops_per_s() for machine in machines], np.float64
        )
        return np.where((speeds > 0) & np.isfinite(speeds), speeds, 0.0)

    def estimated_s(self, flops: Floats, moved_bytes: Floats, operations: Floats) -> Floats:
        """Return the time of each layer on each machine ``[machines, layers]``; infinite without speed.

        Args:
            flops: floating point operations of each layer ``[layers]``.
            moved_bytes: what each layer reads of its weights and cache ``[layers]``.
            operations: calls of kernels in each layer ``[layers]``.
        """
        speed = self._flops_per_s[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.maximum(flops / speed, moved_bytes / self.memory_bytes_per_s[:, None])
        return np.where(speed > 0, times + operations * self.overhead_s[:, None], np.inf)

    def timed(self, way: Literal["forward", "backward"]) -> list[dict[int, float]]:
        """Return the measured seconds of each machine's layers, ``forward`` or ``backward``."""
        return [
            {layer: getattr(timing, f"{way}_s") for layer, timing in self.timings.get(machine.id, {}).items()}
            for machine in self.topology.contributors
        ]

    def corrections(self, estimated_s: Floats, timed: Sequence[Mapping[int, float]]) -> Floats:
        """Return by what to multiply the estimates of each machine ``[machines, 1]``.

        Args:
            estimated_s: of each layer ``[machines, layers]``.
            timed: measured seconds by layer, of each machine.
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
        """Return the time of the first l layers on each machine ``[machines, layers + 1]``.

        Args:
            estimated_s: of each layer ``[machines, layers]``.
            timed: measured seconds by layer, of each machine.
        """
        times = estimated_s * self.corrections(estimated_s, timed)
        for row, layers in enumerate(timed):
            times[row, list(layers)] = list(layers.values())
        return sums(times)


def sums(values: Floats) -> Floats:
    """Return the sums of the first l values along the last axis, ``[..., layers + 1]``."""
    totals = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=totals[..., 1:])
    return totals
