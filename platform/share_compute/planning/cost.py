"""The cost model of training: one formula, and the tables that the search and the simulator read.

For microbatches 1..M that flow through ordered pools p, the predicted time of a step is ::

    step = max over p of  before(p) + busy(p) + tail(p)                  a pool is never faster than its members,
                          fill + (most(p) - 1) * boundary / bandwidth    nor than the link behind it,
                          fill + floor((M - 1) / flight(p)) * trip(p)    nor than its microbatches come back

    fill       = sum of first(p) over all pools + 2 * sum of hop(p) over all links between neighbours
    first(p)   = forward and backward of one microbatch on the fastest member
    busy(p)    = max over members of (its microbatches * its forward and backward of one)
    hop(p)     = latency + boundary bytes / bandwidth, from pool p to pool p + 1, over the best link
    before(p)  = sum of first(q) for q < p + 2 * sum of hop(q) for q < p: the first microbatch on its way to the
                 pool, the last on its way back
    most(p)    = M / (members(p) + members(p + 1) - 1), rounded up: shares are contiguous blocks, so microbatches
                 take no more different ways than that, and at least one way carries so many
    trip(p)    = sum of first(q) for q >= p + 2 * sum of hop(q) for q >= p
    flight(p)  = microbatches that pool p keeps in flight: window(p) + members(p), of the schedule (1F1B)
    tail(p)    = gradient sums that do not hide behind the last backward + the optimizer's update
               = max(ring(p) - backward(p), ring(p) / buckets(p)) + update(p)
    ring(p)    = 2 * (n - 1) / n * gradient bytes / bandwidth + 2 * (n - 1) * latency, among the pool's n members
    forward    = max(operations / measured FLOP/s, weight bytes / measured memory bandwidth)

A layer that a profiler timed on a machine takes that time instead. Every term is a wait that no schedule avoids, so
the event simulator (`share_compute.planning.schedule_simulator`), which knows the order of all cells, does not come out
below it. One exception: gradient sums of a pool behind the first may hide behind the backwards of those before it.
Memory of a member::

    parameters * 4 * (2 + optimizer tensors) + min(window(p) + 1, its microbatches) * activation bytes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heapreplace

import numpy as np

from share_compute.planning.layout import Layout, PoolLayout
from share_compute.planning.network import Floats, Network, transfer_s
from share_compute.planning.profile import FLOAT_BYTES, LayerProfile, ModelProfile
from share_compute.planning.workload import BYTES, GRADIENT_BUCKET_BYTES, TrainingWorkload
from share_compute.topology import Contributor, Topology
from share_compute.training.schedule import windows

MEMORY_SHARE = 0.9
"""Of the lent memory, how much a plan may fill: the rest is for the process and for what the model does not know."""
_UPDATE_PASSES = 3
"""Times that an update goes over the weights: gradient and weight read, weight written. Each optimizer tensor: two."""


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """What a profiler measured of one layer on one machine, for one microbatch."""

    forward_s: float
    backward_s: float


Timings = Mapping[str, Mapping[int, LayerTiming]]
"""By contributor id and layer; layer 0 with the embedding, the last with the head."""


@dataclass(frozen=True, eq=False)
class TrainingCost:
    """Tables and formula of one job on one topology.

    Args:
        profile: the model.
        topology: the machines.
        network: their links.
        workload: the job's batches.
        timings: measured times, which replace estimates. Layers of a machine that were not timed are scaled by what
            its timed ones took against their estimates, and machines that were not timed by the median of the others.
    """

    profile: ModelProfile
    topology: Topology
    network: Network
    workload: TrainingWorkload
    timings: Timings = field(default_factory=dict)

    # -- tables --------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.profile.layers)

    @property
    def num_machines(self) -> int:
        """Machines of the topology."""
        return len(self.topology.contributors)

    @cached_property
    def forward_s(self) -> Floats:
        """Forward time of the first l layers for one microbatch, ``[machines, layers + 1]``; infinite without speed."""
        return self._seconds("forward")

    @cached_property
    def backward_s(self) -> Floats:
        """The same for the backward pass."""
        return self._seconds("backward")

    @cached_property
    def parameters(self) -> Floats:
        """Parameters of the first l layers ``[layers + 1]``; without the second copy of a tied head."""
        return _sums([float(piece.parameters) for piece in self._pieces])

    @cached_property
    def activation_bytes(self) -> Floats:
        """Kept by the first l layers for one microbatch ``[layers + 1]``."""
        tokens = self.workload.sequence_length
        scale = self.workload.microbatch_size * BYTES[self.workload.dtype] / FLOAT_BYTES
        return _sums([scale * piece.activation_bytes.at(tokens) for piece in self._pieces])

    @cached_property
    def boundary_bytes(self) -> Floats:
        """What one microbatch carries over the cut before layer l, ``[layers + 1]``; 0 at both ends."""
        tokens, scale = self.workload.sequence_length, self.workload.microbatch_size * FLOAT_BYTES
        inner = [scale * layer.boundary_numbers.at(tokens) for layer in self.profile.layers[:-1]]
        return np.array([0.0, *inner, 0.0])

    @cached_property
    def memory_bytes(self) -> Floats:
        """What a plan may fill of each machine ``[machines]``."""
        lent = [machine.memory_bytes for machine in self.topology.contributors]
        return MEMORY_SHARE * np.array(lent, dtype=np.float64)

    @cached_property
    def update_s_per_parameter(self) -> Floats:
        """Time of the optimizer for one parameter ``[machines]``."""
        passes = _UPDATE_PASSES + 2 * self.workload.optimizer_tensors
        speeds = [machine.memory_bytes_per_s for machine in self.topology.contributors]
        return np.array([passes * FLOAT_BYTES / speed if 0 < speed < math.inf else 0.0 for speed in speeds])

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of device of each machine: the members of a pool sum gradients, which takes devices of one kind."""
        return tuple(machine.device.kind if machine.devices else "" for machine in self.topology.contributors)

    @cached_property
    def _pieces(self) -> list[LayerProfile]:
        """Layers, with what lives beside the first and the last added to them."""
        return [_joined(self.profile, index) for index in range(self.num_layers)]

    def _seconds(self, way: str) -> Floats:
        tokens, size, dtype = (
            self.workload.sequence_length,
            self.workload.microbatch_size,
            self.workload.dtype,
        )
        grown = [getattr(piece, f"{way}_flops").at(tokens) * size for piece in self._pieces]
        weights = [piece.parameters * BYTES[dtype] * (1 if way == "forward" else 2) for piece in self._pieces]
        times = np.array(
            [
                _roofline(np.array(grown), np.array(weights, dtype=np.float64), machine, dtype)
                for machine in self.topology.contributors
            ]
        ).reshape(self.num_machines, self.num_layers)
        timed = [
            {layer: getattr(timing, f"{way}_s") for layer, timing in self.timings.get(machine.id, {}).items()}
            for machine in self.topology.contributors
        ]
        for row, factor in enumerate(self._corrections(times, timed)):
            times[row] *= factor
            times[row, list(timed[row])] = list(timed[row].values())
        return np.concatenate([np.zeros((self.num_machines, 1)), np.cumsum(times, axis=1)], axis=1)

    def _corrections(self, times: Floats, timed: Sequence[Mapping[int, float]]) -> list[float]:
        """Return by what to multiply each machine's estimates: what its timed layers took against theirs.

        A machine without timed layers is taken to be as wrong as the median of those of its kind, or of all: what was
        measured must not make it look fast only because nobody looked.
        """
        own = [1.0] * self.num_machines
        known: dict[str, list[float]] = {}
        for row, layers in enumerate(timed):
            guessed = float(times[row, list(layers)].sum()) if layers else 0.0
            if 0 < guessed < math.inf:
                own[row] = sum(layers.values()) / guessed
                known.setdefault(self.kinds[row], []).append(own[row])
        every = [factor for factors in known.values() for factor in factors]
        for row, layers in enumerate(timed):
            if not layers and every:
                own[row] = float(np.median(known.get(self.kinds[row], every)))
        return own

    # -- the formula ---------------------------------------------------------------------------------------------

    def cell_s(self, machine: int, start: int, stop: int) -> float:
        """Return forward and backward of one microbatch through layers [start, stop); infinite without speed."""
        forward, backward = self.forward_s[machine], self.backward_s[machine]
        if not math.isfinite(forward[stop] + backward[stop]):
            return math.inf
        return float(forward[stop] - forward[start] + backward[stop] - backward[start])

    def shares(self, members: Sequence[int], start: int, stop: int) -> tuple[int, ...] | None:
        """Return how members share the microbatches so that the last is done soonest; None if one would get none."""
        return fill_shares(
            [self.cell_s(member, start, stop) for member in members], self.workload.microbatches
        )

    def held_parameters(self, start: int, stop: int) -> float:
        """Return the parameters that a member with layers [start, stop) holds."""
        copy = self.profile.tied if stop == self.num_layers and start > 0 else 0
        return float(self.parameters[stop] - self.parameters[start]) + copy

    def first_s(self, pool: PoolLayout) -> float:
        """Return the time of one microbatch on the fastest member."""
        return min(self.cell_s(member, pool.start, pool.stop) for member in pool.members)

    def busy_s(self, pool: PoolLayout) -> float:
        """Return the time that the busiest member computes in a step."""
        return max(
            share * self.cell_s(member, pool.start, pool.stop)
            for member, share in zip(pool.members, pool.shares, strict=True)
        )

    def hop_s(self, before: PoolLayout, after: PoolLayout) -> float:
        """Return the time of one microbatch over the best link between two neighbours, one way."""
        size = float(self.boundary_bytes[after.start])
        return min(
            transfer_s(*link, size)
            for link in {self.network.link(a, b) for a in before.members for b in after.members}
        )

    def carry_s(self, before: PoolLayout, after: PoolLayout) -> float:
        """Return how long the busiest link between neighbours carries all that follows its first microbatch."""
        size = float(self.boundary_bytes[after.start])
        following = most_carried(self.workload.microbatches, len(before.members), len(after.members)) - 1
        if following <= 0:
            return 0.0
        return following * min(
            transfer_s(0.0, link[1], size)
            for link in {self.network.link(a, b) for a in before.members for b in after.members}
        )

    def ring_s(self, pool: PoolLayout) -> float:
        """Return the time to sum the gradients of a pool's members."""
        count = len(pool.members)
        if count == 1:
            return 0.0
        size = self.held_parameters(pool.start, pool.stop) * FLOAT_BYTES * 2 * (count - 1) / count
        links = {self.network.link(a, b) for a in pool.members for b in pool.members if a != b}
        return max(transfer_s(2 * (count - 1) * latency, rate, size) for latency, rate in links)

    def tail_s(self, pool: PoolLayout) -> float:
        """Return what follows the last backward: sums that it did not hide, and the update."""
        held = self.held_parameters(pool.start, pool.stop)
        ring = self.ring_s(pool)
        hidden = max(
            float(self.backward_s[member, pool.stop] - self.backward_s[member, pool.start])
            for member in pool.members
        )
        update = max(held * float(self.update_s_per_parameter[member]) for member in pool.members)
        return max(ring - hidden, ring / self.buckets(pool)) + update

    def buckets(self, pool: PoolLayout) -> int:
        """Return in how many pieces the members of a pool sum their gradients."""
        size = self.held_parameters(pool.start, pool.stop) * FLOAT_BYTES
        return max(1, math.ceil(size / GRADIENT_BUCKET_BYTES))

    def step_s(self, layout: Layout) -> float:
        """Return the predicted time of a step, by the formula of this module."""
        pools, count = layout.pools, self.workload.microbatches
        ahead = windows([len(pool.members) for pool in pools])
        # From the last pool to the first: what a microbatch takes from here and back, and what the step takes.
        trip, step = 0.0, 0.0
        for place in range(len(pools) - 1, -1, -1):
            pool, carry = pools[place], 0.0
            enter = self.first_s(pool)
            if place + 1 < len(pools):
                enter += 2 * self.hop_s(pool, pools[place + 1])
                carry = self.carry_s(pool, pools[place + 1])
            trip += enter
            flight = ahead[place] + len(pool.members)
            waits = max(carry, (count - 1) // flight * trip)
            step = max(enter + step, self.busy_s(pool) + self.tail_s(pool), trip + waits)
        return step

    def member_bytes(self, layout: Layout, place: int, member: int) -> float:
        """Return the memory that one member of one pool needs.

        Args:
            layout: all pools.
            place: index of the pool.
            member: place in the pool.
        """
        pool = layout.pools[place]
        ahead = windows([len(each.members) for each in layout.pools])[place]
        return self.bytes_needed(pool.start, pool.stop, pool.shares[member], ahead)

    def bytes_needed(self, start: int, stop: int, share: int, window: int) -> float:
        """Return the memory of a member: weights, gradients, optimizer state, activations in flight.

        Args:
            start: its first layer.
            stop: one past its last layer.
            share: its microbatches in a step.
            window: ranks that its pool's forwards may run ahead of its backwards.
        """
        weights = self.held_parameters(start, stop) * FLOAT_BYTES * (2 + self.workload.optimizer_tensors)
        # Where another pool is wider, all of `window + 1` consecutive ranks may be those of one member.
        kept = min(share, window + 1)
        inside = float(self.activation_bytes[stop] - self.activation_bytes[start])
        return weights + kept * (inside + float(self.boundary_bytes[start]))

    def fits(self, layout: Layout) -> bool:
        """Return whether no member needs more memory than a plan may fill of its machine."""
        return all(
            self.member_bytes(layout, place, member) <= self.memory_bytes[machine]
            for place, pool in enumerate(layout.pools)
            for member, machine in enumerate(pool.members)
        )

    def may_pool(self, machines: Sequence[int]) -> bool:
        """Return whether machines can be members of one pool: one kind of device, one region."""
        return (
            len({self.kinds[machine] for machine in machines}) == 1
            and len({int(self.network.region[machine]) for machine in machines}) == 1
        )


def fill_shares(cell_s: Sequence[float], microbatches: int) -> tuple[int, ...] | None:
    """Share microbatches out so that the busiest member is done soonest; None if somebody would get none.

    Each microbatch goes to the member that would finish it first, which is optimal for equal pieces.
    """
    if microbatches < len(cell_s) or not all(map(math.isfinite, cell_s)):
        return None
    shares = [0] * len(cell_s)
    done = [(cell, member) for member, cell in enumerate(cell_s)]
    heapify(done)
    for _ in range(microbatches):
        member = done[0][1]
        shares[member] += 1
        heapreplace(done, ((shares[member] + 1) * cell_s[member], member))
    return tuple(shares) if all(shares) else None


def most_carried(microbatches: int, before: int, after: int) -> int:
    """Return how many microbatches one pair of members carries at least, between pools of so many members."""
    return -(-microbatches // (before + after - 1))


def _roofline(operations: Floats, weight_bytes: Floats, machine: Contributor, dtype: str) -> Floats:
    speed = machine.flops_per_s(dtype) or machine.flops_per_s()
    if not 0 < speed < math.inf:
        return np.full(len(operations), np.inf)
    rate = machine.memory_bytes_per_s
    times: Floats = np.maximum(operations / speed, weight_bytes / rate if 0 < rate < math.inf else 0.0)
    return times


def _joined(profile: ModelProfile, index: int) -> LayerProfile:
    layer = profile.layers[index]
    for beside, place in ((profile.embedding, 0), (profile.head, len(profile.layers) - 1)):
        if index == place:
            layer = LayerProfile(
                parameters=layer.parameters + beside.parameters,
                **{
                    name: tuple(map(sum, zip(getattr(layer, name), getattr(beside, name), strict=True)))
                    for name in ("forward_flops", "backward_flops", "activation_bytes", "cache_numbers")
                },
                boundary_numbers=layer.boundary_numbers,
            )
    return layer


def _sums(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
