"""What a member does for copies of shards: it gives its own away, and keeps those of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import ray

from share_compute.protocol.roster import Worker
from share_compute_actors.member.answering import answers
from share_compute_actors.member.copies.copying import Copied, Outline, ShardRange
from share_compute_actors.member.engine import Engine
from share_compute_actors.member.pieces import Piece
from share_compute_actors.messages import Followed
from share_compute_actors.wire import FLAG, NOTHING


class KeepsCopies:
    """The part of a member that has to do with copies."""

    _engine: Engine

    # -- as owner ----------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="copies")
    def outline(self, shard: ShardRange) -> Outline:
        """Say what a shard consists of. See `Copier`."""
        return self._engine.copier.outline(shard)

    @ray.method(concurrency_group="copies")
    def set_aside(self, keeper: Worker, shard: ShardRange, names: Sequence[str]) -> Copied:
        """Set some parameters aside, so that they can be fetched while training goes on. See `Copier`."""
        return self._engine.copier.copy(shard, names, keeper)

    @ray.method(concurrency_group="copies")
    def piece_aside(self, ticket: int, name: str, start: int, stop: int) -> Piece:
        """Return bytes of what was set aside. See `Copier`."""
        return self._engine.copier.piece(ticket, name, start, stop)

    # -- as buddy ----------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="copies")
    @answers(NOTHING)
    def keep_copies(
        self, epoch: int, committed: int, followed: Mapping[int, Followed], keepers: Collection[Worker]
    ) -> None:
        """Keep these copies from now on, and no others; before the epoch begins in which gradients come.

        What is there already stays, and copies of other layers begin with it; what is missing is fetched while training
        goes on.

        Args:
            epoch: that is about to begin.
            committed: last committed step.
            followed: whose, by pool.
            keepers: who keeps copies of what is here.
        """
        self._engine.copier.forget_all_but(keepers)
        copies = self._engine.copies
        outlines = copies.outlines(committed, followed)
        self._engine.order(partial(copies.keep, epoch, committed, followed, outlines))

    @ray.method(concurrency_group="copies")
    @answers(FLAG)
    def bring_to(self, shard: ShardRange, step: int, scales: Mapping[int, float]) -> bool:
        """Bring a copy to a committed step; return whether that was possible.

        Args:
            shard: whose copy.
            step: its number.
            scales: what the gradient of each committed step was multiplied by.
        """
        follower = self._engine.copies.of(shard)
        return follower is not None and follower.bring_to(step, scales)

    @ray.method(concurrency_group="copies")
    @answers(FLAG)
    def is_up_to_date(self) -> bool:
        """Return whether all copies are whole, and little is left to bring them to the last committed step."""
        return self._engine.copies.catch_up()

    @ray.method(concurrency_group="copies")
    @answers(FLAG)
    def has_whole_copies(self) -> bool:
        """Return whether each copy that it is to keep is whole."""
        return self._engine.copies.are_whole()
