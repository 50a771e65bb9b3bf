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
    update(p)  = max over members of (what the optimizer reads and writes / measured memory bandwidth + call)
    call       = STEP_OPERATIONS * measured overhead of an operation: a member is called and answers once in a step
    ring(p)    = 2 * (n - 1) / n * gradient bytes / bandwidth + 2 * (n - 1) * latency, among the pool's n members
    forward    = max(FLOPs / measured FLOP/s, weight bytes / measured memory bandwidth)
                 + operations * measured overhead of one

An operation is a call of a kernel, which takes its time however small its tensors are: it decides for small models. A
layer that a profiler timed on a machine takes that time instead. Every term is a wait that no schedule avoids, so
the event simulator (`share_compute.planning.schedule_simulator`), which knows the order of all cells, does not come out
below it. One exception: gradient sums of a pool behind the first may hide behind the backwards of those before it.
Memory of a member::

    parameters * 4 + trained parameters * 4 * (1 + optimizer tensors)
        + min(window(p) + 1, its microbatches) * activation bytes + what one layer computes again

In two-byte precision each microbatch in flight also keeps a copy of the weights in that type. With activation
checkpointing only what enters a layer counts as activation; its inside is there for one layer and microbatch at a time,
and its backward takes its forward's time once more.
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
from share_compute.planning.network import Floats, transfer_s
from share_compute.planning.profile import FLOAT_BYTES, NOTHING, LayerProfile, joined
from share_compute.planning.tables import CostTables, sums
from share_compute.planning.workload import AUTOCAST_KEPT, BYTES, GRADIENT_BUCKET_BYTES, TrainingWorkload
from share_compute.training.schedule import windows

STEP_OPERATIONS = 400
"""Small operations that take as long as what a member does once in a step beside its cells: it is called, gets its
samples, measures gradients, runs the optimizer, answers. Measured with a small CNN on a CPU."""
_UPDATE_PASSES = 3
"""Times that an update goes over the weights: gradient and weight read, weight written. Each optimizer tensor: two."""


@dataclass(frozen=True, eq=False)
class TrainingCost(CostTables):
    """Tables and formula of one training job on one topology."""

    workload: TrainingWorkload

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
    def parameters(self) -> Floats:
        """Parameters of the first l layers ``[layers + 1]``; without the second copy of a tied head."""
        return sums(np.array([float(piece.parameters) for piece in self._pieces]))

    @cached_property
    def trained(self) -> Floats:
        """Of these, the ones that are trained ``[layers + 1]``: they have gradients and state of the optimizer."""
        return sums(np.array([float(piece.parameters - piece.frozen) for piece in self._pieces]))

    @cached_property
    def activation_bytes(self) -> Floats:
        """Kept by the first l layers for one microbatch ``[layers + 1]``."""
        layers = self.profile.layers
        kept = [self._inside_bytes(layer) for layer in layers]
        if self.workload.activation_checkpointing:
            kept = [min(each, self._leaving_bytes(layer)) for each, layer in zip(kept, layers, strict=True)]
        kept[0] += self._inside_bytes(self.profile.embedding)
        kept[-1] += self._inside_bytes(self.profile.head)
        return sums(np.array(kept))

    @cached_property
    def recomputed_bytes(self) -> float:
        """What there is for a moment, when the inside of the largest layer is computed again."""
        if not self.workload.activation_checkpointing:
            return 0.0
        return max(map(self._inside_bytes, self.profile.layers))

    @cached_property
    def boundary_bytes(self) -> Floats:
        """What one microbatch carries over the cut before layer l, ``[layers + 1]``; 0 at both ends."""
        return np.array([0.0, *map(self._leaving_bytes, self.profile.layers[:-1]), 0.0])

    @cached_property
    def update_s_per_parameter(self) -> Floats:
        """Time of the optimizer for one parameter ``[machines]``."""
        passes = _UPDATE_PASSES + 2 * self.workload.optimizer_tensors
        return passes * FLOAT_BYTES / self.memory_bytes_per_s

    @cached_property
    def call_s(self) -> Floats:
        """What a member does once in a step, whatever its layers ``[machines]``."""
        return STEP_OPERATIONS * self.overhead_s

    @cached_property
    def _pieces(self) -> list[LayerProfile]:
        """Layers, with what lives beside the first and the last added to them."""
        pieces = list(self.profile.layers)
        pieces[0] = joined([self.profile.embedding, pieces[0]])
        pieces[-1] = joined([pieces[-1], self.profile.head])
        return pieces

    def _inside_bytes(self, piece: LayerProfile) -> float:
        """Return what a layer keeps of one microbatch for its backward, with its output."""
        size, tokens = self.workload.microbatch_size, self.workload.sequence_length
        if self.workload.dtype == "float32":
            return size * piece.activation_bytes.at(tokens)
        copies = piece.parameters * BYTES[self.workload.dtype] if piece is not self.profile.embedding else 0
        return AUTOCAST_KEPT * size * piece.activation_bytes.at(tokens) + copies

    def _leaving_bytes(self, layer: LayerProfile) -> float:
        """Return what a layer hands on of one microbatch."""
        return (
            self.workload.microbatch_size
            * FLOAT_BYTES
            * layer.boundary_numbers.at(self.workload.sequence_length)
        )

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

    def held_parameters(self, start: int, stop: int) -> float:
        """Return the parameters that a member with layers [start, stop) holds."""
        copy = self.profile.tied if stop == self.num_layers and start > 0 else 0
        return float(self.parameters[stop] - self.parameters[start]) + copy

    def trained_parameters(self, start: int, stop: int) -> float:
        """Return those of them that are trained."""
        has_copy = self.profile.tied_trains and stop == self.num_layers and start > 0
        return float(self.trained[stop] - self.trained[start]) + (self.profile.tied if has_copy else 0)

    def state_bytes(self, held: Floats | float, trained: Floats | float) -> Floats | float:
        """Return the memory of weights, gradients and optimizer state.

        Args:
            held: parameters.
            trained: those of them that are trained.
        """
        return FLOAT_BYTES * (held + trained * (1 + self.workload.optimizer_tensors))

    def carried_bytes(self, start: int, stop: int) -> float:
        """Return what a newcomer fetches: weights and optimizer state, without gradients."""
        held, trained = self.held_parameters(start, stop), self.trained_parameters(start, stop)
        return FLOAT_BYTES * (held + trained * self.workload.optimizer_tensors)

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

    def tail_s(self, pool: PoolLayout) -> float:
        """Return what follows the last backward: sums that it did not hide, and the update."""
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
        held, trained = self.held_parameters(start, stop), self.trained_parameters(start, stop)
        fixed = float(self.state_bytes(held, trained)) + self.recomputed_bytes
        # Where another pool is wider, all of `window + 1` consecutive ranks may be those of one member.
        kept = min(share, window + 1)
        inside = float(self.activation_bytes[stop] - self.activation_bytes[start])
        return fixed + kept * (inside + float(self.boundary_bytes[start]))

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
