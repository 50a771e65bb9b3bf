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
                 + the gradient's way to a buddy
               = max(ring(p) - backward(p), ring(p) / buckets(p)) + log(p) + update(p)
    update(p)  = max over members of (what the optimizer reads and writes / measured memory bandwidth + call)
    call       = STEP_OPERATIONS * measured overhead of an operation: a member is called and answers once in a step
    ring(p)    = 2 * (n - 1) / n * gradient bytes / bandwidth + 2 * (n - 1) * latency, among the pool's n members
    log(p)     = 2 * latency + gradient bytes / bandwidth, over the best link of its machine; only for the member of a
                 pool of one, whose step counts when another machine has its gradient, too
    forward    = max(FLOPs / measured FLOP/s, weight bytes / measured memory bandwidth)
                 + operations * measured overhead of one

An operation is a call of a kernel, which takes its time however small its tensors are: it decides for small models. A
layer that a profiler timed on a machine takes that time instead. Every term is a wait that no schedule avoids, so
the event simulator (`share_compute.planning.schedule_simulator`), which knows the order of all cells, does not come out
below it. One exception: what a pool behind the first does with its gradient, summing it and sending it to a buddy, may
hide behind the backwards of those before it.

Memory is in `share_compute.planning.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Literal

import numpy as np

from share_compute.planning.layout import Layout, PoolLayout
from share_compute.planning.memory import TrainingMemory
from share_compute.planning.network import Floats, transfer_s
from share_compute.planning.profile import FLOAT_BYTES, NOTHING, LayerProfile
from share_compute.planning.workload import BYTES, GRADIENT_BUCKET_BYTES
from share_compute.training.schedule import windows

STEP_OPERATIONS = 400
"""Small operations that take as long as what a member does once in a step beside its cells: it is called, gets its
samples, measures gradients, runs the optimizer, answers. Measured with a small CNN on a CPU."""
_UPDATE_PASSES = 3
"""Times that an update goes over the weights: gradient and weight read, weight written. Each optimizer tensor: two."""


@dataclass(frozen=True, eq=False)
class TrainingCost(TrainingMemory):
    """Tables and formula of one training job on one topology."""

    # -- tables --------------------------------------------------------------------------------------------------

    @cached_property
    def forward_s(self) -> Floats:
        """Forward time of the first l layers for one microbatch, ``[machines, layers + 1]``; infinite without speed."""
        return self._seconds("forward")

    @cached_property
    def backward_s(self) -> Floats:
        """The same for the backward pass."""
        return self._seconds("backward")

    @cached_property
    def update_s_per_parameter(self) -> Floats:
        """Time of the optimizer for one parameter ``[machines]``."""
        passes = _UPDATE_PASSES + 2 * self.workload.optimizer_tensors
        return passes * FLOAT_BYTES / self.memory_bytes_per_s

    @cached_property
    def call_s(self) -> Floats:
        """What a member does once in a step, whatever its layers ``[machines]``."""
        return STEP_OPERATIONS * self.overhead_s

    def _seconds(self, way: Literal["forward", "backward"]) -> Floats:
        estimated = self._estimated_s(self._pieces, way)
        if way == "backward" and self.workload.activation_checkpointing:
            layers = self.profile.layers
            again = [layer.backward_flops != NOTHING or layer.backward_operations > 0 for layer in layers]
            estimated = estimated + np.where(again, self._estimated_s(layers, "forward"), 0.0)
        return self.corrected_s(estimated, self.timed(way))

    def _estimated_s(self, pieces: Sequence[LayerProfile], way: Literal["forward", "backward"]) -> Floats:
        tokens, size = self.workload.sequence_length, self.workload.microbatch_size
        flops = [getattr(piece, f"{way}_flops").at(tokens) * size for piece in pieces]
        passes = BYTES[self.workload.dtype] * (1 if way == "forward" else 2)
        weights = [float(piece.parameters * passes) for piece in pieces]
        operations = [float(getattr(piece, f"{way}_operations")) for piece in pieces]
        return self.estimated_s(np.array(flops), np.array(weights), np.array(operations))

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
        size = self.trained_parameters(pool.start, pool.stop) * FLOAT_BYTES * 2 * (count - 1) / count
        links = {self.network.link(a, b) for a in pool.members for b in pool.members if a != b}
        return max(transfer_s(2 * (count - 1) * latency, rate, size) for latency, rate in links)

    def log_s(self, pool: PoolLayout, others: Sequence[int] | None = None) -> float:
        """Return how long a pool of one waits until another machine has its gradient; 0.0 where there is no buddy.

        Args:
            pool: the pool.
            others: machines of which the one that is reached soonest is the buddy; every other one if it is None.
        """
        is_alone = len(pool.members) == 1 and pool.stop - pool.start < self.num_layers
        if not self.workload.buddies or not is_alone:
            return 0.0
        (owner,) = pool.members
        size = self.trained_parameters(pool.start, pool.stop) * FLOAT_BYTES
        if others is None:
            links = self.ways_out[int(self.network.region[owner])]
        else:
            there = np.unique(self.network.region[[other for other in others if other != owner]])
            here = int(self.network.region[owner])
            links = tuple(self.network.between(here, int(region)) for region in there)
        return min((transfer_s(2 * latency, rate, size) for latency, rate in links), default=math.inf)

    @cached_property
    def ways_out(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Links (latency in s, bytes/s) from a machine of each region to any other machine."""
        network = self.network
        regions, counts = np.unique(network.region, return_counts=True)
        return tuple(
            tuple(
                network.between(here, int(there))
                for there, count in zip(regions, counts, strict=True)
                if there != here or count > 1
            )
            for here in range(len(network.latency_s))
        )

    def tail_s(self, pool: PoolLayout) -> float:
        """Return what follows the last backward: sums that it did not hide, the way to a buddy, and the update."""
        return self.log_s(pool) + self.end_s(pool)

    def end_s(self, pool: PoolLayout) -> float:
        """Return the same without the way to a buddy."""
        trained = self.trained_parameters(pool.start, pool.stop)
        ring = self.ring_s(pool)
        hidden = max(
            float(self.backward_s[member, pool.stop] - self.backward_s[member, pool.start])
            for member in pool.members
        )
        update = max(
            trained * float(self.update_s_per_parameter[member]) + float(self.call_s[member])
            for member in pool.members
        )
        return max(ring - hidden, ring / self.buckets(pool)) + update

    def buckets(self, pool: PoolLayout) -> int:
        """Return in how many pieces the members of a pool sum their gradients."""
        size = self.trained_parameters(pool.start, pool.stop) * FLOAT_BYTES
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

    def may_pool(self, machines: Sequence[int]) -> bool:
        """Return whether machines can be members of one pool: one kind of device, one region."""
        return (
            len({self.kinds[machine] for machine in machines}) == 1
            and len({int(self.network.region[machine]) for machine in machines}) == 1
        )


def fill_shares(cell_s: Sequence[float], microbatches: int, *, least: int = 0) -> tuple[int, ...] | None:
    """Share microbatches out so that the busiest member is done soonest; None if somebody would get none.

    Each microbatch goes to the member that would finish it first, which is optimal for equal pieces.

    Args:
        cell_s: time of one microbatch on each member.
        microbatches: pieces of the batch.
        least: everybody gets so many before that.
    """
    if microbatches < len(cell_s) or not all(map(math.isfinite, cell_s)):
        return None
    shares = [least] * len(cell_s)
    done = [((least + 1) * cell, member) for member, cell in enumerate(cell_s)]
    heapify(done)
    for _ in range(microbatches - sum(shares)):
        member = done[0][1]
        shares[member] += 1
        heapreplace(done, ((shares[member] + 1) * cell_s[member], member))
    return tuple(shares) if all(shares) else None


def most_carried(microbatches: int, before: int, after: int) -> int:
    """Return how many microbatches one pair of members carries at least, between pools of so many members."""
    return -(-microbatches // (before + after - 1))
