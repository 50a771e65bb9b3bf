"""Remote methods of a member for backup copies.

As a primary, a member provides its shard. As a backup, it keeps copies of other members' shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import ray

from share_compute.protocol.membership import ShardPart, Worker
from share_compute_actors.group.answering import answers
from share_compute_actors.messages import Followed, Updates
from share_compute_actors.training.backups.copying import Copied, ShardOutline
from share_compute_actors.training.member.engine import TrainingEngine
from share_compute_actors.transport.pieces import Piece
from share_compute_actors.transport.traffic import Traffic
from share_compute_actors.wire import FLAG, NOTHING


class BackupCalls:
    """Mixin with a member's methods for backup copies."""

    _engine: TrainingEngine
    _traffic: Traffic

    # -- as primary --------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="copies")
    def outline(self, shard: ShardPart) -> ShardOutline:
        """Return a description of a shard's contents. See `Copier.outline`."""
        return self._engine.copier.outline(shard)

    @ray.method(concurrency_group="copies")
    def stage_copy(self, backup: Worker, shard: ShardPart, names: Sequence[str]) -> Copied:
        """Clone parameters or buffers, so that a backup can fetch them while training continues. See `Copier.copy`."""
        return self._engine.copier.copy(shard, names, backup)

    @ray.method(concurrency_group="copies")
    def staged_piece(self, ticket: int, name: str, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of a cloned tensor. See `Copier.piece`."""
        piece = self._engine.copier.piece(ticket, name, start, stop)
        self._traffic.send(piece.content.nbytes)
        return piece

    # -- as backup ---------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="copies")
    @answers(NOTHING)
    def keep_copies(
        self, epoch: int, committed: int, followed: Mapping[int, Followed], backups: Collection[Worker]
    ) -> None:
        """Keep copies of exactly these primaries' shards, and drop all other copies.

        Existing copies of these shards stay if they are still usable (see `Copies.keep`). New copies are
        fetched while training continues.

        Args:
            epoch: number of the epoch that is about to begin.
            committed: last committed step.
            followed: primaries whose shards to copy, by stage.
            backups: backup members and catch-up replicas that keep copies of this member's shard.
        """
        self._engine.copier.forget_all_but(backups)
        copies = self._engine.copies
        outlines = copies.outlines(committed, followed)
        self._engine.order(partial(copies.keep, epoch, committed, followed, outlines))

    @ray.method(concurrency_group="copies")
    @answers(FLAG)
    def bring_to(self, shard: ShardPart, step: int, updates: Updates) -> bool:
        """Apply gradients to the copy of a shard up to a committed step; return whether this succeeded.

        Also return False if this member keeps no copy of the shard.

        Args:
            shard: layers and share of the copy.
            step: number of the step.
            updates: update factors and learning rates of committed steps.
        """
        follower = self._engine.copies.of(shard)
        return follower is not None and follower.bring_to(step, *updates)

    @ray.method(concurrency_group="copies")
    @answers(FLAG)
    def is_up_to_date(self) -> bool:
        """Return whether each usable copy is complete and has applied its pending gradients.

        The first call after a copy is complete starts to apply its pending gradients, and does not wait.
        """
        return self._engine.copies.catch_up()

    @ray.method(concurrency_group="copies")
    @answers(FLAG)
    def has_whole_copies(self) -> bool:
        """Return whether each copy that this member keeps is complete and usable."""
        return self._engine.copies.are_whole()
