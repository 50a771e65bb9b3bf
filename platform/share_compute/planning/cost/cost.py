"""The cost model of training: one formula, and the tables that the search and the simulator read.

For microbatches 1..M that flow through ordered stages p, the predicted time of a step is ::

    step = max over p of  before(p) + busy(p) + tail(p)                  limit of the stage's members
                          fill + (most(p) - 1) * boundary / bandwidth    limit of the link behind the stage
                          fill + floor((M - 1) / flight(p)) * trip(p)    limit of the microbatches in flight

    fill       = sum of first(p) over all stages + 2 * sum of hop(p) over all links between neighbours
    first(p)   = forward and backward of one microbatch on the fastest member
    busy(p)    = max over members of (its number of microbatches * its forward and backward of one microbatch)
    hop(p)     = latency + boundary bytes / bandwidth, from stage p to stage p + 1, over the best link. Boundary bytes
                 are those after compression (`TrainingCost.link_bytes`). The time of codecs is not counted.
    before(p)  = sum of first(q) for q < p + 2 * sum of hop(q) for q < p
    most(p)    = M / (members(p) + members(p + 1) - 1), rounded up. Shares are contiguous blocks, so microbatches cross
                 between at most members(p) + members(p + 1) - 1 pairs of members. One pair carries at least most(p).
    trip(p)    = sum of first(q) for q >= p + 2 * sum of hop(q) for q >= p
    flight(p)  = window(p) + members(p), with the window of the 1F1B schedule (`share_compute.protocol.schedule`)
    tail(p)    = gradient sums that are not hidden behind the last backward + the optimizer's update
                 + the transfer of the gradient to a backup member
               = max(sum(p) - backward(p), sum(p) / buckets(p)) + log(p) + update(p)
                 With shares of the optimizer's state, half of sum(p) gathers the weights, after the update.
    backward(p) = longest backward of one microbatch among the stage's members
    buckets(p) = number of buckets in which the stage's gradients are summed
    update(p)  = max over members of (bytes that the optimizer reads and writes / measured memory bandwidth + call)
    call       = STEP_OPERATIONS * measured overhead of one operation: the fixed work of a member in each step
    sum(p)     = time of the sums among the stage's n members with the job's collective, or the fastest one
                 (`share_compute.planning.cost.sums`); 2 * (n - 1) / n * gradient bytes / bandwidth + 2 * latency with
                 ``sharded``; if sums are compressed, (n - 1) * compressed bytes of one run's gradient / bandwidth
                 + latency
    log(p)     = 2 * latency + gradient bytes / bandwidth, over the best link from the stage's machine to a backup
                 member; 0 unless backups are on and the stage has one member and not all layers
    forward    = max(FLOPs / measured FLOP/s, weight bytes / measured memory bandwidth)
                 + operations * measured overhead of one operation
                 + with slices of sequences, the time of keys and values on the ring: (slices - 1) * (latency + key and
                 value bytes / bandwidth), with the links of the machine's region
                 + with several ranks, the time of their exchanges (`_between_ranks_s`, `_parts_s`)
    backward   = as forward, with the FLOPs and operations of the backward and twice the weight bytes; with activation
                 checkpointing, plus another forward of each layer that has a backward;
                 keys and values go around again, and their gradients go with them and one link further

An operation is a call of a kernel. If a profiler timed a layer on a machine, the measured time replaces the estimate.
The event simulator (`share_compute.planning.cost.schedule_simulator`) predicts a shorter step than the formula only if
gradient sums and backups overlap with backwards of other stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Literal

import numpy as np

from share_compute.models.profiles.profile import FLOAT_BYTES, NOTHING, LayerProfile
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.memory import TrainingMemory
from share_compute.planning.cost.sums import GradientSums, SumTime
from share_compute.planning.network.network import Floats, transfer_s
from share_compute.protocol.schedule import even_shares, windows
from share_compute.specification.workload import BYTES, GRADIENT_BUCKET_BYTES

STEP_OPERATIONS = 400
"""Fixed work of a member in each step besides forwards and backwards, as a number of small operations.

Measured with a small CNN on a CPU.
"""
_UPDATE_PASSES = 3
"""Memory passes of a weight update: read gradient, read weight, write weight. Each optimizer tensor adds two."""


@dataclass(frozen=True, eq=False)
class TrainingCost(TrainingMemory):
    """Cost model of one training job on one topology, with the step formula of this module."""

    # -- tables --------------------------------------------------------------------------------------------------

    @cached_property
    def forward_s(self) -> Floats:
        """Seconds of one microbatch's forward through the first l layers, shape ``[machines, layers + 1]``.

        For machines of unknown speed, the time is infinite if l > 0.
        """
        return self._seconds("forward")

    @cached_property
    def backward_s(self) -> Floats:
        """Seconds of one microbatch's backward through the first l layers, shape ``[machines, layers + 1]``."""
        return self._seconds("backward")

    @cached_property
    def update_s_per_parameter(self) -> Floats:
        """Seconds that the optimizer takes for one parameter on each machine, shape ``[machines]``."""
        passes = _UPDATE_PASSES + 2 * self.workload.optimizer_tensors
        return passes * FLOAT_BYTES / self.memory_bytes_per_s

    @cached_property
    def call_s(self) -> Floats:
        """Seconds of fixed work per step on each machine, independent of its layers; shape ``[machines]``."""
        return STEP_OPERATIONS * self.overhead_s

    @cached_property
    def link_bytes(self) -> Floats:
        """Bytes that cross a link for one microbatch at a cut before layer l ``[layers + 1]``; 0 at both ends.

        These are `boundary_bytes`, compressed as the job specifies.
        """
        codecs = [self.workload.boundaries.codec(layer) for layer in range(self.num_layers + 1)]
        if set(codecs) == {"none"}:
            return self.boundary_bytes
        from share_compute.compression.boundaries import boundary_bytes  # noqa: PLC0415 - loads torch

        sizes = [
            size if codec == "none" else float(boundary_bytes(codec, round(size / FLOAT_BYTES)))
            for size, codec in zip(self.boundary_bytes, codecs, strict=True)
        ]
        return np.array(sizes)

    def _seconds(self, way: Literal["forward", "backward"]) -> Floats:
        estimated = self._estimated_s(self._pieces, way)
        if way == "backward" and self.workload.activation_checkpointing:
            layers = self.profile.layers
            again = [layer.backward_flops != NOTHING or layer.backward_operations > 0 for layer in layers]
            estimated = estimated + np.where(again, self._estimated_s(layers, "forward"), 0.0)
        if self.workload.slices > 1:
            estimated = estimated + self._ring_s(way)
        if self.workload.ranks > 1:
            estimated = estimated + self._between_ranks_s(way) + self._parts_s(way)
        return self.corrected_s(estimated, self.timed(way))

    def _between_ranks_s(self, way: Literal["forward", "backward"]) -> Floats:
        """Return the time in which the ranks of a member sum hidden states, ``[machines, layers]``.

        Attention and the MLP of a layer have one sum each, in each direction (Megatron-LM, arXiv:1909.08053). With
        recomputation, the sums of the forward pass are repeated.
        """
        again = way == "backward" and self.workload.activation_checkpointing
        tokens, size = self.workload.sequence_length, self.workload.microbatch_size
        number = BYTES[self.workload.dtype]
        crossing = [
            size * number * layer.boundary_numbers.at(tokens) if layer.parameters else 0.0
            for layer in self.profile.layers
        ]
        sums = [(4.0 if again else 2.0) if layer.parameters else 0.0 for layer in self.profile.layers]
        return self.exchanged_s(np.array(sums), np.array(crossing))

    def _parts_s(self, way: Literal["forward", "backward"]) -> Floats:
        """Return the time in which devices with memory of their own exchange parts of parameters, or of gradients.

        The shape is ``[machines, layers]``. The first device gathers the gradients of each microbatch, and sends
        parameters once in a step. Each takes half the time of a sum, in which all data also travels back.
        """
        trained = [float(layer.parameters - layer.frozen) for layer in self.profile.layers]
        times = 0.5 if way == "backward" else 0.5 / self.workload.microbatches
        taken = self.exchanged_s(times * np.sign(trained), FLOAT_BYTES * np.array(trained))
        own = np.array([machine.has_own_memories for machine in self.topology.contributors])
        return np.where(own[:, None], taken, 0.0)

    def _ring_s(self, way: Literal["forward", "backward"]) -> Floats:
        """Return the time in which keys and values of a slice go around the ring, ``[machines, layers]``.

        Neighbours on the ring are in the machine's own region. In the backward pass, the gradients of keys and values
        go around with them.
        """
        slices, again = self.workload.slices, way == "backward" and self.workload.activation_checkpointing
        turns = slices - 1 if way == "forward" else slices + (slices - 1 if again else 0)
        sent = slices - 1 if way == "forward" else 2 * slices - 1 + (slices - 1 if again else 0)
        links = [self.network.between(int(region), int(region)) for region in self.network.region]
        times = [
            latency * turns + sent * self.cached_bytes / rate if rate > 0 else np.zeros(self.num_layers)
            for latency, rate in links
        ]
        return np.array(times)

    def _estimated_s(self, pieces: Sequence[LayerProfile], way: Literal["forward", "backward"]) -> Floats:
        tokens, size = self.workload.sequence_length, self.workload.microbatch_size
        flops = [getattr(piece, f"{way}_flops").at(tokens) * size for piece in pieces]
        passes = BYTES[self.workload.dtype] * (1 if way == "forward" else 2)
        weights = [float(piece.parameters * passes) for piece in pieces]
        operations = [float(getattr(piece, f"{way}_operations")) for piece in pieces]
        number = BYTES[self.workload.dtype] / FLOAT_BYTES
        traffic = [getattr(piece, f"{way}_traffic").at(tokens) * size * number for piece in pieces]
        estimated = self.estimated_s(np.array(flops), np.array(weights), np.array(operations))
        return estimated + np.array(traffic) / self.memory_bytes_per_s[:, None]

    # -- the formula ---------------------------------------------------------------------------------------------

    def cell_s(self, machine: int, start: int, stop: int) -> float:
        """Return forward plus backward time of one microbatch in layers [start, stop); infinite if speed is unknown."""
        forward, backward = self.forward_s[machine], self.backward_s[machine]
        if not math.isfinite(forward[stop] + backward[stop]):
            return math.inf
        return float(forward[stop] - forward[start] + backward[stop] - backward[start])

    def shares(self, members: Sequence[int], start: int, stop: int) -> tuple[int, ...] | None:
        """Return `fill_shares` for these members; None if a member gets no microbatch or has an unknown speed.

        Members that compute slices of sequences have one slice of each sequence, or several if members were lost.
        """
        if self.workload.slices > 1:
            each = self.workload.slice_microbatches
            return tuple(each * slices for slices in even_shares(self.workload.slices, len(members)))
        return fill_shares(
            [self.cell_s(member, start, stop) for member in members], self.workload.microbatches
        )

    def first_s(self, stage: StageLayout) -> float:
        """Return forward plus backward time of one microbatch on the fastest member of a stage."""
        return min(self.cell_s(member, stage.start, stage.stop) for member in stage.members)

    def busy_s(self, stage: StageLayout) -> float:
        """Return the compute time per step of the busiest member of a stage."""
        return max(
            share * self.cell_s(member, stage.start, stage.stop)
            for member, share in zip(stage.members, stage.shares, strict=True)
        )

    def hop_s(self, before: StageLayout, after: StageLayout) -> float:
        """Return the one-way time of one microbatch over the best link between two neighbouring stages."""
        size = float(self.link_bytes[after.start])
        return min(
            transfer_s(*link, size)
            for link in {self.network.link(a, b) for a in before.members for b in after.members}
        )

    def carry_s(self, before: StageLayout, after: StageLayout) -> float:
        """Return a lower bound on the seconds for which the busiest link between two stages carries tensors one way.

        The first microbatch is not counted, and neither are latencies.
        """
        size = float(self.link_bytes[after.start])
        following = most_carried(self.workload.microbatches, len(before.members), len(after.members)) - 1
        if following <= 0:
            return 0.0
        return following * min(
            transfer_s(0.0, link[1], size)
            for link in {self.network.link(a, b) for a in before.members for b in after.members}
        )

    @cached_property
    def sums(self) -> GradientSums:
        """Predicts the algorithms that sum gradients."""
        return GradientSums(
            self.network, self.workload.collective, is_compressed=self.workload.run_bytes is not None
        )

    @property
    def summed_bytes(self) -> float:
        """Bytes of each trained parameter in one sum of gradients, compressed if the job specifies compression."""
        return FLOAT_BYTES if self.workload.run_bytes is None else self.workload.run_bytes

    def sum_time(self, stage: StageLayout) -> SumTime | None:
        """Return the time and traffic of the algorithm that sums a stage's gradients; None for one member."""
        if len(stage.members) == 1:
            return None
        size = self.trained_parameters(stage.start, stage.stop) * self.summed_bytes
        return self.sums.best(stage.members, self.kinds[stage.members[0]], size)

    def sum_s(self, stage: StageLayout) -> float:
        """Return the time to sum the gradients of a stage's members; 0.0 for one member."""
        time = self.sum_time(stage)
        if time is None:
            return 0.0
        return time.of(self.trained_parameters(stage.start, stage.stop) * self.summed_bytes)

    def log_s(self, stage: StageLayout, others: Sequence[int] | None = None) -> float:
        """Return the time to send the gradient of a one-member stage to a backup member; 0.0 if no backup is needed.

        The time is infinite if no other machine can be reached.

        Args:
            stage: the stage.
            others: machines that may be the backup member; the one with the fastest link is chosen. None allows all.
        """
        is_alone = len(stage.members) == 1 and stage.stop - stage.start < self.num_layers
        if not self.workload.backups or not is_alone:
            return 0.0
        (owner,) = stage.members
        size = self.trained_parameters(stage.start, stage.stop) * FLOAT_BYTES
        if others is None:
            links = self.ways_out[int(self.network.region[owner])]
        else:
            there = np.unique(self.network.region[[other for other in others if other != owner]])
            here = int(self.network.region[owner])
            links = tuple(self.network.between(here, int(region)) for region in there)
        return min((transfer_s(2 * latency, rate, size) for latency, rate in links), default=math.inf)

    @cached_property
    def ways_out(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each region, the (latency in s, bytes/s) of each link from one of its machines to other machines.

        There is one link to each other region, and one inside the region if it has several machines.
        """
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

    def tail_s(self, stage: StageLayout) -> float:
        """Return the time after the last backward: gradient sums that do not overlap with it, backup, and update."""
        return self.log_s(stage) + self.end_s(stage)

    def end_s(self, stage: StageLayout) -> float:
        """Return `tail_s` without the backup of the gradient."""
        updated = self.updated_parameters(stage.start, stage.stop, len(stage.members))
        gathering = self.gather_s(stage)
        summing = self.sum_s(stage) - gathering
        hidden = max(
            float(self.backward_s[member, stage.stop] - self.backward_s[member, stage.start])
            for member in stage.members
        )
        update = max(
            updated * float(self.update_s_per_parameter[member]) + float(self.call_s[member])
            for member in stage.members
        )
        return max(summing - hidden, summing / self.buckets(stage)) + update + gathering

    def gather_s(self, stage: StageLayout) -> float:
        """Return the part of `sum_s` after the update: with shares, half of the traffic gathers the weights."""
        return self.sum_s(stage) / 2 if self.workload.shares_optimizer else 0.0

    def buckets(self, stage: StageLayout) -> int:
        """Return the number of buckets in which the members of a stage sum their gradients."""
        size = self.trained_parameters(stage.start, stage.stop) * FLOAT_BYTES
        return max(1, math.ceil(size / GRADIENT_BUCKET_BYTES))

    def is_feasible(self, layout: Layout) -> bool:
        """Return whether a layout fits into memory and needs no dead link."""
        return self.fits(layout) and math.isfinite(self.step_s(layout))

    def step_s(self, layout: Layout) -> float:
        """Return the predicted time of a step, by the formula of this module."""
        stages, count = layout.stages, self.workload.microbatches
        ahead = windows([len(stage.members) for stage in stages])
        # At stage p, `trip` is trip(p) of the formula above, and `step` is the step time of the stages p, p + 1, ...
        trip, step = 0.0, 0.0
        for place in range(len(stages) - 1, -1, -1):
            stage, carry = stages[place], 0.0
            enter = self.first_s(stage)
            if place + 1 < len(stages):
                enter += 2 * self.hop_s(stage, stages[place + 1])
                carry = self.carry_s(stage, stages[place + 1])
            trip += enter
            flight = ahead[place] + len(stage.members)
            waits = max(carry, (count - 1) // flight * trip)
            step = max(enter + step, self.busy_s(stage) + self.tail_s(stage), trip + waits)
        return step

    def may_share(self, machines: Sequence[int]) -> bool:
        """Return whether machines can be members of one stage: all need the same kind of device and the same region."""
        return (
            len({self.kinds[machine] for machine in machines}) == 1
            and len({int(self.network.region[machine]) for machine in machines}) == 1
        )


def fill_shares(cell_s: Sequence[float], microbatches: int, *, least: int = 0) -> tuple[int, ...] | None:
    """Distribute microbatches so that the last member finishes as early as possible; return the number for each member.

    Return None if a member gets no microbatch or has an infinite time.

    Args:
        cell_s: time of one microbatch on each member.
        microbatches: number of microbatches to distribute.
        least: number of microbatches that every member gets before the rest is distributed.
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
    """Return a lower bound on the microbatches between the busiest pair of members: most(p) of this module's formula.

    Args:
        microbatches: number of microbatches in a step.
        before: number of members of a stage.
        after: number of members of the next stage.
    """
    return -(-microbatches // (before + after - 1))
