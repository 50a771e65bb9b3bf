"""Provides the weights and optimizer state of a member's own shard, or of a backup copy, to other members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import ray
from torch import Tensor

from share_compute.models.storage.weights import rows_of
from share_compute.protocol.membership import ShardPart
from share_compute.training.loss_scale import LossScale
from share_compute_actors.group.answering import answers
from share_compute_actors.messages import Extent, read_extents
from share_compute_actors.training.backups.copying import current_names
from share_compute_actors.training.backups.followers import Follower
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.schemas import HOLDING
from share_compute_actors.transport.pieces import Piece
from share_compute_actors.transport.traffic import Traffic
from share_compute_actors.wire import NAMES


class ShardReader:
    """Reads a member's own shard and its backup copies. The methods are those of `GivesState`, without remote calls.

    Args:
        copy_of: returns the backup copy of some layers; None if none is kept.
        here: returns the member's runner; None before it has weights.
    """

    def __init__(
        self, copy_of: Callable[[ShardPart], Follower | None], here: Callable[[], Runner | None]
    ) -> None:
        self._copy_of = copy_of
        self._runner = here

    @answers(NAMES)
    def inventory(self, shard: ShardPart | None = None) -> tuple[str, ...]:
        """See `GivesState.inventory`."""
        return tuple(self._copy(shard).inventory() if shard is not None else current_names(self._here()))

    def loss_scale(self, shard: ShardPart | None = None) -> LossScale:
        """See `GivesState.loss_scale`."""
        return self._copy(shard).loss_scale() if shard is not None else self._here().loss_scale

    def weights(self, extents: bytes, shard: ShardPart | None = None) -> list[Piece]:
        """See `GivesState.weights`."""
        if shard is not None:
            return self._copied(read_extents(extents), shard)
        return _as_they_are(self._here().stage.persistent(), read_extents(extents))

    def optimizer_shapes(self, shard: ShardPart | None = None) -> dict[str, tuple[int, ...]]:
        """See `GivesState.optimizer_shapes`."""
        if shard is not None:
            return self._copy(shard).optimizer_shapes()
        return {name: tuple(tensor.shape) for name, tensor in self._here().state_tensors().items()}

    def optimizer_state(self, extents: bytes, shard: ShardPart | None = None) -> list[Piece]:
        """See `GivesState.optimizer_state`."""
        if shard is not None:
            return self._copied(read_extents(extents), shard)
        return _as_they_are(self._here().state_tensors(), read_extents(extents))

    def _copied(self, extents: Sequence[Extent], shard: ShardPart) -> list[Piece]:
        copy = self._copy(shard)
        return [Piece.of_rows(extent.name, copy.rows(*extent).float()) for extent in extents]

    def _copy(self, shard: ShardPart) -> Follower:
        follower = self._copy_of(shard)
        assert follower is not None, f"no copy of layers {shard} is kept here"
        return follower

    def _here(self) -> Runner:
        runner = self._runner()
        assert runner is not None
        return runner


class GivesState:
    """Mixin with methods that let other members and the coordinator read a member's shard or backup copies.

    Do not call the methods that read tensors while a step is computed. The argument `shard` is the part of the model
    of the backup copy to read; None reads the member's own shard. The argument `extents` is
    the result of `pack_extents`.
    """

    _own_state: ShardReader
    _runner: Runner | None
    _traffic: Traffic

    @ray.method(concurrency_group="pieces")
    @answers(HOLDING)
    def holding(self) -> ShardPart | None:
        """Return the layers and the share of the optimizer's state of this member; None if it has no weights yet."""
        return None if self._runner is None else self._runner.part

    @ray.method(concurrency_group="pieces")
    def inventory(self, shard: ShardPart | None = None) -> bytes:
        """Return the stored names of parameters and persistent buffers that have the last update, encoded by `answers`.

        After a failed exchange of weights, a member with a share of the optimizer's state may lack updates of the other
        shares, so only the parameters of its own share and untrained parameters are returned.
        """
        return self._own_state.inventory(shard)

    @ray.method(concurrency_group="pieces")
    def loss_scale(self, shard: ShardPart | None = None) -> LossScale:
        """Return the loss scale of the first step that is not applied yet."""
        return self._own_state.loss_scale(shard)

    @ray.method(concurrency_group="pieces")
    def weights(self, extents: bytes, shard: ShardPart | None = None) -> list[Piece]:
        """Return rows of parameters and buffers, as float32; one piece for each extent."""
        return self._sent(self._own_state.weights(extents, shard))

    @ray.method(concurrency_group="pieces")
    def optimizer_shapes(self, shard: ShardPart | None = None) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of the optimizer's state and of the branch's state, by name."""
        return self._own_state.optimizer_shapes(shard)

    @ray.method(concurrency_group="pieces")
    def optimizer_state(self, extents: bytes, shard: ShardPart | None = None) -> list[Piece]:
        """Return rows of the tensors in `optimizer_shapes`, as float32; one piece for each extent."""
        return self._sent(self._own_state.optimizer_state(extents, shard))

    def _here(self) -> Runner:
        assert self._runner is not None
        return self._runner

    def _sent(self, pieces: list[Piece]) -> list[Piece]:
        self._traffic.send(sum(piece.content.nbytes for piece in pieces))
        return pieces


def _as_they_are(tensors: Mapping[str, Tensor], extents: Sequence[Extent]) -> list[Piece]:
    return [
        Piece.of_rows(name, rows_of(tensors[name].detach(), start, stop).float())
        for name, start, stop in extents
    ]
