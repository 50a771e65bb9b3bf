"""Memory that a member of a training job needs on its machine.

The bytes that a member of stage p with layers [start, stop) needs are the sum of ::

    state      = parameters * 4 * (1 + parts)
                 + trained parameters * 4 * (sets + branch tensors)
                 + updated parameters * 4 * optimizer tensors
    in flight  = min(window(p) + 1, share) * activation bytes
    kept       = 2 * share * (boundary bytes before start + boundary bytes after stop)
    transient  = activation bytes inside the largest layer, if layers are recomputed
                 + activation bytes of one tile, if the first layer is computed in tiles
                 + 16 * parameters of the largest layer, if ranks exchange their gradients
                 + 2 * bytes of a batch in the first stage, if each machine reads the full batch of a step and of the
                   next one
                 + max(4 * elements of the largest trained parameter,
                       8 * elements of a trained tied parameter, if another stage holds it, too)

    share      = approximate number of the member's microbatches if the busiest other member of its stage is lost
    sets       = maximum number of gradient sets that the member holds at once. A set has one sum for each trained
                 parameter
    updated    = trained parameters; if the members of a stage keep shares of the optimizer's state,
                 max(trained parameters / members of the stage, parameters of the largest tensor), since shares are made
                 of whole tensors
    parts      = (ranks - 1) / ranks: the parts of the parameters that the other ranks of a member have
    branch tensors = 0, or with branches: base weights, and the residual of compression with error feedback

Members on both sides of a boundary between stages keep the activations and gradients that crossed it until the step is
committed, because a member that replaces a lost member needs them again.

`share_compute.protocol.tree` explains why a member may hold several gradient sets. Autograd allocates the gradient of a
parameter before it is added to a set. Two stages with a tied parameter each hold two sums of its gradient: one per
stage.

If ranks compute on GPUs, the memory of one of them counts (`Contributor.memory_bytes`). The first one has all of the
above except the parts of other ranks, which are counted nonetheless. Activations count as if no layer were divided.

In two-byte precision, each microbatch in flight also keeps a copy of the layers' weights in that type. With activation
checkpointing, a layer's activations count as at most the size of its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from share_compute.models.profiles.profile import FLOAT_BYTES, LayerProfile, joined
from share_compute.planning.cost.layout import Layout
from share_compute.planning.cost.tables import CostTables, sums
from share_compute.planning.network.network import Floats
from share_compute.protocol.schedule import one_forward_one_backward, windows
from share_compute.protocol.tree import SummationTree
from share_compute.specification.workload import AUTOCAST_KEPT, BYTES, TrainingWorkload


@dataclass(frozen=True, eq=False)
class TrainingMemory(CostTables):
    """Memory tables and memory formula of one training job."""

    workload: TrainingWorkload

    # -- tables --------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> Floats:
        """Number of parameters of the first l layers ``[layers + 1]``; a tied head is not counted again."""
        return sums(np.array([float(piece.parameters) for piece in self._pieces]))

    @cached_property
    def trained(self) -> Floats:
        """Number of trained parameters of the first l layers ``[layers + 1]``."""
        return sums(np.array([float(piece.parameters - piece.frozen) for piece in self._pieces]))

    @cached_property
    def activation_bytes(self) -> Floats:
        """Bytes of activations that the first l layers keep for the backward of one microbatch, ``[layers + 1]``."""
        layers = self.profile.layers
        kept = [self._inside_bytes(layer) for layer in layers]
        if self.workload.activation_checkpointing:
            kept = [min(each, self._leaving_bytes(layer)) for each, layer in zip(kept, layers, strict=True)]
        kept[0] += self._inside_bytes(self.profile.embedding)
        kept[-1] += self._inside_bytes(self.profile.head)
        return sums(np.array(kept))

    @cached_property
    def recomputed_bytes(self) -> float:
        """Activation bytes inside the largest layer while it is recomputed; 0.0 without activation checkpointing."""
        if not self.workload.activation_checkpointing:
            return 0.0
        return max(map(self._inside_bytes, self.profile.layers))

    @cached_property
    def tile_bytes(self) -> float:
        """Activation bytes of the largest tile of the first layer for one microbatch; 0.0 without tiles."""
        first = self.profile.layers[0].recomputed_bytes.at(self.workload.sequence_length)
        number = 1.0 if self.workload.dtype == "float32" else AUTOCAST_KEPT
        return number * self.workload.microbatch_size * first

    @cached_property
    def cached_bytes(self) -> Floats:
        """Bytes of the keys and values of each layer for one microbatch, in float32 ``[layers]``."""
        size, tokens = self.workload.microbatch_size, self.workload.sequence_length
        return np.array(
            [size * FLOAT_BYTES * layer.cache_numbers.at(tokens) for layer in self.profile.layers]
        )

    @property
    def ring_bytes(self) -> float:
        """Bytes of other slices' keys, values and gradients that a member holds at a time; 0.0 without slices.

        While the tensors of one slice leave, those of another slice arrive.
        """
        return 4 * float(self.cached_bytes.max()) if self.workload.slices > 1 else 0.0

    @property
    def exchange_bytes(self) -> float:
        """Bytes of the gradients of a layer, in all ranks, while they are gathered; 0.0 without ranks."""
        if self.workload.ranks == 1:
            return 0.0
        return 4.0 * FLOAT_BYTES * max(layer.parameters for layer in self.profile.layers)

    @cached_property
    def boundary_bytes(self) -> Floats:
        """Bytes of the tensor that crosses a cut before layer l for one microbatch ``[layers + 1]``; 0 at both ends."""
        return np.array([0.0, *map(self._leaving_bytes, self.profile.layers[:-1]), 0.0])

    @cached_property
    def largest(self) -> Floats:
        """Size in elements of each layer's largest trained parameter ``[layers]``, without a tied head's copy."""
        return np.array([float(piece.largest) for piece in self._pieces])

    @cached_property
    def _pieces(self) -> list[LayerProfile]:
        """Layers, with the embedding added to the first and the head added to the last."""
        pieces = list(self.profile.layers)
        pieces[0] = joined([self.profile.embedding, pieces[0]])
        pieces[-1] = joined([pieces[-1], self.profile.head])
        return pieces

    def _inside_bytes(self, piece: LayerProfile) -> float:
        """Return the bytes that a layer keeps for the backward of one microbatch, including its output.

        In two-byte precision, a copy of the layer's weights in that type is included, except for the embedding.
        """
        size, tokens = self.workload.microbatch_size, self.workload.sequence_length
        if self.workload.dtype == "float32":
            return size * piece.activation_bytes.at(tokens)
        copies = piece.parameters * BYTES[self.workload.dtype] if piece is not self.profile.embedding else 0
        return AUTOCAST_KEPT * size * piece.activation_bytes.at(tokens) + copies

    def _leaving_bytes(self, layer: LayerProfile) -> float:
        """Return the bytes of a layer's output for one microbatch."""
        return (
            self.workload.microbatch_size
            * FLOAT_BYTES
            * layer.boundary_numbers.at(self.workload.sequence_length)
        )

    @cached_property
    def least_bytes(self) -> float:
        """Lower bound on the bytes of any stage: state of the smallest layer, and its activations of one microbatch."""
        trained = np.diff(self.trained)
        updated = 0.0 if self.workload.shares_optimizer else trained
        state = self.state_bytes(np.diff(self.parameters), trained, updated)
        return float(np.min(state + np.diff(self.activation_bytes)))

    # -- the formula ---------------------------------------------------------------------------------------------

    def held_parameters(self, start: int, stop: int) -> float:
        """Return the number of parameters that a member with layers [start, stop) holds."""
        copy = self.profile.tied if stop == self.num_layers and start > 0 else 0
        return float(self.parameters[stop] - self.parameters[start]) + copy

    def trained_parameters(self, start: int, stop: int) -> float:
        """Return the number of trained parameters that a member with layers [start, stop) holds."""
        has_copy = self.profile.tied_trains and stop == self.num_layers and start > 0
        return float(self.trained[stop] - self.trained[start]) + (self.profile.tied if has_copy else 0)

    def updated_parameters(self, start: int, stop: int, members: int) -> float:
        """Return the number of parameters that each member of a stage with layers [start, stop) updates.

        With shares of the optimizer's state, this is the size of the largest share. A share is at least as large as the
        largest parameter tensor.

        Args:
            start: first layer of the stage.
            stop: one past the last layer of the stage.
            members: number of members of the stage.
        """
        trained = self.trained_parameters(start, stop)
        if not self.workload.shares_optimizer:
            return trained
        return max(trained / members, float(self.largest_from(start)[stop - start - 1]))

    def largest_from(self, start: int) -> Floats:
        """Return the elements of the largest trained parameter of the layer ranges [start, stop), ``[layers - start]``.

        ``stop`` runs from ``start + 1`` to the number of layers.
        """
        largest: Floats = np.maximum.accumulate(self.largest[start:])
        if start > 0 and self.profile.tied_trains:
            largest[-1] = max(largest[-1], self.profile.tied)
        return largest

    def state_bytes(
        self, held: Floats | float, trained: Floats | float, updated: Floats | float | None = None
    ) -> Floats | float:
        """Return the bytes of weights, one gradient set, optimizer state and branch state, and of all ranks' parts.

        Args:
            held: number of parameters.
            trained: number of these parameters that are trained.
            updated: number of these parameters whose optimizer state is kept; None for all trained ones.
        """
        work, updated = self.workload, trained if updated is None else updated
        kept = trained * (1 + work.branch_tensors) + updated * work.optimizer_tensors
        return FLOAT_BYTES * (held * (1 + (work.ranks - 1) / work.ranks) + kept)

    def carried_bytes(self, start: int, stop: int) -> float:
        """Return the bytes of weights, optimizer state and branch state of a member with layers [start, stop)."""
        held, trained = self.held_parameters(start, stop), self.trained_parameters(start, stop)
        return FLOAT_BYTES * (held + trained * self.workload.state_tensors)

    def member_bytes(self, layout: Layout, place: int, member: int) -> float:
        """Return the bytes that one member of one stage needs.

        Args:
            layout: all stages.
            place: index of the stage.
            member: index of the member in the stage.
        """
        stage = layout.stages[place]
        further = self._sets(tuple(each.shares for each in layout.stages), place, member) - 1
        return self._one_set_bytes(layout, place, member) + further * FLOAT_BYTES * self.trained_parameters(
            stage.start, stage.stop
        )

    def _sets(self, shares: tuple[tuple[int, ...], ...], place: int, member: int) -> int:
        if self.workload.slices > 1:  # each slice is a run of the tree
            return shares[place][member] // self.workload.slice_microbatches
        return gradient_sets(shares, place, member, keeps_runs_apart=self.workload.run_bytes is not None)

    def _one_set_bytes(self, layout: Layout, place: int, member: int) -> float:
        """Return `bytes_needed` for one member of a layout."""
        stage = layout.stages[place]
        ahead = windows([len(each.members) for each in layout.stages])[place]
        share, members = after_a_loss(stage.shares)[member], len(stage.members)
        if self.workload.slices > 1:
            # Slices of a lost member's sequences need more memory, or a replacement member.
            share = stage.shares[member]
            slices = share // self.workload.slice_microbatches
            ahead = slices * (len(layout.stages) - place) - 1
        return self.bytes_needed(stage.start, stage.stop, share, ahead, members)

    def bytes_needed(self, start: int, stop: int, share: int, window: int, members: int = 1) -> float:
        """Return the bytes that a member with one gradient set needs.

        Args:
            start: first layer of the member.
            stop: one past the last layer of the member.
            share: number of microbatches of the member in a step.
            window: number of microbatches by which the stage's forwards may run ahead of its backwards.
            members: number of members of the stage.
        """
        held, trained = self.held_parameters(start, stop), self.trained_parameters(start, stop)
        updated = self.updated_parameters(start, stop, members)
        fixed = float(self.state_bytes(held, trained, updated)) + self.for_a_time_bytes(start, stop)
        # All `window + 1` microbatches in flight may be on one member if another stage has more members.
        in_flight = min(share, window + 1)
        inside = float(self.activation_bytes[stop] - self.activation_bytes[start])
        return fixed + in_flight * inside + share * self.kept_bytes(start, stop)

    def for_a_time_bytes(self, start: int, stop: int) -> float:
        """Return the transient bytes of a member with layers [start, stop)."""
        return float(self.for_a_time_from(start)[stop - start - 1])

    def for_a_time_from(self, start: int) -> Floats:
        """Return the transient bytes of the layer ranges [start, stop), shape ``[layers - start]``.

        ``stop`` runs from ``start + 1`` to the number of layers.
        """
        largest, exchanged = self.largest_from(start), np.zeros(self.num_layers - start)
        twin = self.profile.tied if self.profile.tied_trains else 0
        if start == 0:
            exchanged[:-1] = 2 * twin
        else:
            exchanged[-1] = 2 * twin
        given = self.tile_bytes + 2 * self.workload.batch_bytes if start == 0 else 0.0
        sizes: Floats = (
            self.recomputed_bytes
            + self.ring_bytes
            + self.exchange_bytes
            + given
            + FLOAT_BYTES * np.maximum(largest, exchanged)
        )
        return sizes

    def kept_bytes(self, start: int, stop: int) -> float:
        """Return the bytes of one microbatch's boundary tensors, which are kept until the step is committed."""
        return 2.0 * float(self.boundary_bytes[start] + self.boundary_bytes[stop])

    def fits(self, layout: Layout) -> bool:
        """Return whether every member fits into the memory that a plan may use on its machine."""
        return self.may_fit(layout) and all(
            self._holds_sets(layout, place, member)
            for place, stage in enumerate(layout.stages)
            for member in range(len(stage.members))
        )

    def _holds_sets(self, layout: Layout, place: int, member: int) -> bool:
        stage = layout.stages[place]
        available = self.memory_bytes[stage.members[member]]
        most = self._one_set_bytes(layout, place, member) + (
            stage.shares[member] - 1
        ) * FLOAT_BYTES * self.trained_parameters(stage.start, stage.stop)
        return bool(most <= available or self.member_bytes(layout, place, member) <= available)

    def may_fit(self, layout: Layout) -> bool:
        """Return whether each member has enough memory if it holds one gradient set.

        A layout that passes may still fail `fits`.
        """
        return all(
            self._one_set_bytes(layout, place, member) <= self.memory_bytes[machine]
            for place, stage in enumerate(layout.stages)
            for member, machine in enumerate(stage.members)
        )


def after_a_loss(shares: Sequence[int]) -> tuple[int, ...]:
    """Return, for each member, its approximate share if the busiest other member is lost."""
    if len(shares) == 1:
        return tuple(shares)
    count = sum(shares)
    others = [max([*shares[:place], *shares[place + 1 :]]) for place in range(len(shares))]
    return tuple(-(-share * count // (count - other)) for share, other in zip(shares, others, strict=True))


@cache
def _tree(runs: tuple[int, ...], keeps_runs_apart: bool) -> SummationTree:
    return SummationTree(runs, keeps_runs_apart)


@cache
def gradient_sets(
    shares: tuple[tuple[int, ...], ...], stage: int, member: int, *, keeps_runs_apart: bool = False
) -> int:
    """Return the maximum number of gradient sets that a member holds, in a job whose first plan has these shares.

    Args:
        shares: number of microbatches of each member of each stage.
        stage: index of the member's stage.
        member: index of the member in the stage.
        keeps_runs_apart: see `SummationTree`.
    """
    runs = max(shares, key=len)
    if shares[stage] == runs:
        return 1
    order = [
        action.microbatch for action in one_forward_one_backward(shares, stage, member) if action.kind == "B"
    ]
    return _tree(runs, keeps_runs_apart).buffers(order)
