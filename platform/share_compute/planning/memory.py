"""What a member of a training job needs of its machine's memory.

For a member of pool p with layers [start, stop)::

    state      = parameters * 4 + trained parameters * 4 * (sets + optimizer tensors)
    in flight  = min(window(p) + 1, share) * activation bytes
    kept       = 2 * share * (boundary bytes before start + boundary bytes after stop)
    for a time = the inside of one layer, where it is computed again
                 + max(4 * largest trained parameter, 8 * tied parameters where they are in another pool, too)

    share      = microbatches of the member, when the other member with most of them was lost
    sets       = gradients of all trained parameters that it adds to at one time

What went over a boundary, activations one way and gradients the other, is kept by both sides until the step is
committed: whoever comes in place of a lost member is sent it again. A member holds one set of gradients where its
microbatches are a run of the job's order of sums (`share_compute.protocol.tree`), which the widest pool's are; in other
pools it may hold several. Autograd makes the gradient of a parameter anew before it is added to a set; pools that share
a tied parameter keep their own sum of its gradient and what the other sent.

In two-byte precision each microbatch in flight also keeps a copy of the weights in that type. With activation
checkpointing only what enters a layer counts as activation; its inside is there for one layer and microbatch at a time,
and its backward takes its forward's time once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from share_compute.planning.layout import Layout
from share_compute.planning.network import Floats
from share_compute.planning.profile import FLOAT_BYTES, LayerProfile, joined
from share_compute.planning.tables import CostTables, sums
from share_compute.planning.workload import AUTOCAST_KEPT, BYTES, TrainingWorkload
from share_compute.protocol.tree import SummationTree
from share_compute.training.schedule import one_forward_one_backward, windows


@dataclass(frozen=True, eq=False)
class TrainingMemory(CostTables):
    """Tables of what one training job holds, and the formula."""

    workload: TrainingWorkload

    # -- tables --------------------------------------------------------------------------------------------------

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
    def largest(self) -> Floats:
        """Numbers of the largest trained parameter of each layer ``[layers]``; without the copy of a tied head."""
        return np.array([float(piece.largest) for piece in self._pieces])

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

    @cached_property
    def least_bytes(self) -> float:
        """What every part of the model needs at least: state and one microbatch of the layer that needs least.

        Not what goes over boundaries: a part that has more layers may have fewer boundaries.
        """
        state = self.state_bytes(np.diff(self.parameters), np.diff(self.trained))
        return float(np.min(state + np.diff(self.activation_bytes)))

    # -- the formula ---------------------------------------------------------------------------------------------

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

    def member_bytes(self, layout: Layout, place: int, member: int) -> float:
        """Return the memory that one member of one pool needs.

        Args:
            layout: all pools.
            place: index of the pool.
            member: place in the pool.
        """
        pool = layout.pools[place]
        further = gradient_sets(tuple(each.shares for each in layout.pools), place, member) - 1
        return self._one_set_bytes(layout, place, member) + further * FLOAT_BYTES * self.trained_parameters(
            pool.start, pool.stop
        )

    def _one_set_bytes(self, layout: Layout, place: int, member: int) -> float:
        """Return what a member needs if it holds one set of gradients: all that its own pool says."""
        pool = layout.pools[place]
        ahead = windows([len(each.members) for each in layout.pools])[place]
        return self.bytes_needed(pool.start, pool.stop, after_a_loss(pool.shares)[member], ahead)

    def bytes_needed(self, start: int, stop: int, share: int, window: int) -> float:
        """Return the memory of a member that holds one set of gradients.

        Args:
            start: its first layer.
            stop: one past its last layer.
            share: its microbatches in a step.
            window: ranks that its pool's forwards may run ahead of its backwards.
        """
        held, trained = self.held_parameters(start, stop), self.trained_parameters(start, stop)
        fixed = float(self.state_bytes(held, trained)) + self.for_a_time_bytes(start, stop)
        # Where another pool is wider, all of `window + 1` consecutive ranks may be those of one member.
        in_flight = min(share, window + 1)
        inside = float(self.activation_bytes[stop] - self.activation_bytes[start])
        return fixed + in_flight * inside + share * self.kept_bytes(start, stop)

    def for_a_time_bytes(self, start: int, stop: int) -> float:
        """Return what there is beside the state for a part of a step, whatever the microbatches."""
        return float(self.for_a_time_from(start)[stop - start - 1])

    def for_a_time_from(self, start: int) -> Floats:
        """Return the same for all ranges of layers that begin there ``[layers - start]``, the shortest first."""
        largest, exchanged = np.maximum.accumulate(self.largest[start:]), np.zeros(self.num_layers - start)
        twin = self.profile.tied if self.profile.tied_trains else 0
        if start == 0:
            exchanged[:-1] = 2 * twin
        else:
            largest[-1], exchanged[-1] = max(largest[-1], twin), 2 * twin
        sizes: Floats = self.recomputed_bytes + FLOAT_BYTES * np.maximum(largest, exchanged)
        return sizes

    def kept_bytes(self, start: int, stop: int) -> float:
        """Return what is kept of one microbatch until the step is committed."""
        return 2.0 * float(self.boundary_bytes[start] + self.boundary_bytes[stop])

    def fits(self, layout: Layout) -> bool:
        """Return whether no member needs more memory than a plan may fill of its machine."""
        return self.may_fit(layout) and all(
            self._holds_sets(layout, place, member)
            for place, pool in enumerate(layout.pools)
            for member in range(len(pool.members))
        )

    def _holds_sets(self, layout: Layout, place: int, member: int) -> bool:
        pool = layout.pools[place]
        room = self.memory_bytes[pool.members[member]]
        most = self._one_set_bytes(layout, place, member) + (
            pool.shares[member] - 1
        ) * FLOAT_BYTES * self.trained_parameters(pool.start, pool.stop)
        return bool(most <= room or self.member_bytes(layout, place, member) <= room)

    def may_fit(self, layout: Layout) -> bool:
        """Return whether each member has memory for one set of gradients: all that is known of a pool by itself.

        The search sees one pool at a time; what it finds is asked whether it `fits` before it becomes a plan.
        """
        return all(
            self._one_set_bytes(layout, place, member) <= self.memory_bytes[machine]
            for place, pool in enumerate(layout.pools)
            for member, machine in enumerate(pool.members)
        )


def after_a_loss(shares: Sequence[int]) -> tuple[int, ...]:
    """Return about how many microbatches each member of a pool computes when the other with most of them is lost."""
    if len(shares) == 1:
        return tuple(shares)
    count = sum(shares)
    others = [max([*shares[:place], *shares[place + 1 :]]) for place in range(len(shares))]
    return tuple(-(-share * count // (count - other)) for share, other in zip(shares, others, strict=True))


@cache
def _tree(runs: tuple[int, ...]) -> SummationTree:
    return SummationTree(runs)


@cache
def gradient_sets(shares: tuple[tuple[int, ...], ...], pool: int, member: int) -> int:
    """Return how many gradients of all trained parameters a member holds at most, in a job that begins with this plan.

    Args:
        shares: microbatches of each member of each pool.
        pool: index of the member's pool.
        member: its place in the pool.
    """
    runs = max(shares, key=len)
    if shares[pool] == runs:
        return 1
    order = [
        action.microbatch for action in one_forward_one_backward(shares, pool, member) if action.kind == "B"
    ]
    return _tree(runs).buffers(order)
