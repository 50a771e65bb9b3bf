"""Remote methods of a member for merges of branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch
from torch import Tensor

from share_compute.errors import ContributorLost, VerificationFailed
from share_compute.models.storage.weights import rows_of
from share_compute.protocol.member import MemberMachine
from share_compute.synchronization.ranges import payload_digest
from share_compute_actors.group.answering import answers
from share_compute_actors.group.fetching import SourceClient, fill
from share_compute_actors.group.packed_fetching import PackedClient, filled
from share_compute_actors.messages import MemberSetup, Sources, read_extents, server_source
from share_compute_actors.training.member.engine import TrainingEngine
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.saving import folder_tensors
from share_compute_actors.training.member.schemas import VERSION
from share_compute_actors.transport.pieces import PIECES, Piece
from share_compute_actors.transport.traffic import Traffic
from share_compute_actors.wire import NAMES, NOTHING


class MergesBranches:
    """Mixin with a member's methods for merges. Call them only while training is paused after a round."""

    _machine: MemberMachine
    _engine: TrainingEngine
    _runner: Runner | None
    _setup: MemberSetup
    _shard_store: Any
    _traffic: Traffic
    _offered: Mapping[str, Tensor]

    @ray.method(concurrency_group="orders")
    @answers(NAMES)
    def offer_contribution(self) -> tuple[str, ...]:
        """Compute this shard's part of the contribution, which `contribution_rows` then returns; return its names.

        Raises:
            UserError, VerificationFailed: as `folder_tensors`.
        """
        return self._engine.order(self._offer_contribution)

    def _offer_contribution(self) -> tuple[str, ...]:
        assert self._runner is not None
        self._offered = folder_tensors(self._runner, self._setup.training.lora, "contribution")["model"]
        return tuple(self._offered)

    @ray.method(concurrency_group="pieces")
    @answers(PIECES)
    def contribution_rows(self, extents: bytes) -> list[Piece]:
        """Return bytes of the payloads that `offer_contribution` computed, one piece per extent."""
        offered = self._offered
        pieces = [
            Piece.of_rows(extent.name, rows_of(offered[extent.name], extent.start, extent.stop))
            for extent in read_extents(extents)
        ]
        self._traffic.send(sum(piece.content.nbytes for piece in pieces))
        return pieces

    @ray.method(concurrency_group="orders")
    @answers(VERSION)
    def version(self) -> int | None:
        """Return the number of merges that all parameters of the shard include; None if it trains no parameter."""
        branch = self._runner.branch if self._runner is not None else None
        return None if branch is None else branch.version

    @ray.method(concurrency_group="orders")
    @answers(NOTHING)
    def end_round(self, base: int) -> None:
        """Keep a copy of the weights at the end of the round; training then continues while the round is merged.

        The member's backup copies become outdated. Call `restart_copies` after this was called on all members.

        Args:
            base: initial version of the round.
        """
        self._engine.order(partial(self._end_round, base))

    def _end_round(self, base: int) -> None:
        self._engine.copies.outdate(self._machine.applied)
        if self._runner is not None and self._runner.branch is not None:
            self._runner.branch.end_round(base)

    @ray.method(concurrency_group="orders")
    @answers(NOTHING)
    def merge(
        self, version: int, before: int, *, closes_round: bool, ranges: RangesOfUpdate | None = None
    ) -> None:
        """Load an update and apply it; see `BranchState.merge`.

        The member's backup copies become outdated. Call `restart_copies` after all members have merged.

        Args:
            version: version that the update makes.
            before: version of the weights to which the update is added.
            closes_round: whether the update ends the open round of this branch.
            ranges: machines that have the update; None to load the update that the shard store has open.

        Raises:
            ContributorLost: data arrived damaged in every attempt, or a machine with a range was lost or sent wrong
                data.
            ShardStoreLost: the shard store died.
            UserError: the change of a parameter in this round is not finite or too large.
            VerificationFailed: the update does not fit the shard, or an update before this one is missing.
        """
        self._engine.order(partial(self._merge, version, before, ranges, closes_round=closes_round))

    def _merge(self, version: int, before: int, ranges: RangesOfUpdate | None, *, closes_round: bool) -> None:
        self._engine.copies.outdate(self._machine.applied)
        runner = self._runner
        if runner is None or runner.branch is None:
            return
        sizes = runner.branch.update_bytes(version, before)
        if not sizes:
            return
        payloads = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
        if ranges is not None:
            filled(PackedClient(ranges.sources, self._traffic, ranges.folder), "rows", payloads, torch.uint8)
            _require_digests(payloads, ranges.digests)
        else:
            client = SourceClient(Sources((server_source(self._shard_store),)), traffic=self._traffic)
            _require_fit(version, sizes, client.ask(client.sources.all[0], "update_bytes"))
            fill(payloads, client, "update", dtype=torch.uint8)
        self._offered = {}
        runner.merge(version, before, payloads, closes_round=closes_round)

    @ray.method(concurrency_group="orders")
    @answers(NOTHING)
    def show_merged(self, step: int) -> None:
        """Load the merged weights that the shard store has open, for evaluations until the next step is trained.

        Do nothing if they are already loaded.

        Args:
            step: number of the last step that was applied.

        Raises:
            ContributorLost: data arrived damaged in every attempt.
            ShardStoreLost: the shard store died.
        """
        self._engine.order(partial(self._show_merged, step))

    def _show_merged(self, step: int) -> None:
        runner = self._runner
        if runner is None or runner.branch is None or runner.shown_step == step:
            return
        trained = {name: each for name, each in runner.parameters.items() if each.requires_grad}
        weights = {name: torch.empty(each.shape) for name, each in trained.items()}
        client = SourceClient(Sources((server_source(self._shard_store),)))
        fill(weights, client, "update")
        runner.show_merged(step, weights)

    @ray.method(concurrency_group="copies")
    @answers(NOTHING)
    def restart_copies(self) -> None:
        """Drop the backup copies that this member keeps, and copy the same primaries' shards again.

        Call this on all members after each merge, because a merge changes weights without a gradient.
        """
        self._engine.order(self._engine.copies.restart)


@dataclass(frozen=True, slots=True)
class RangesOfUpdate:
    """Machines that have the update of a merge."""

    folder: str
    """Folder of the update on these machines."""
    sources: Sources
    digests: Mapping[str, str]
    """Digest of each payload, by stored name."""


def _require_digests(payloads: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
    for name, payload in payloads.items():
        if payload_digest(name, payload) != digests.get(name):
            raise ContributorLost(
                f"the update of {name} is not the one that was merged",
                hint="no action needed: it is read again",
            )


def _require_fit(version: int, sizes: Mapping[str, int], found: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if found.get(name) != size:
            raise VerificationFailed(
                f"the update to version {version} has {found.get(name, 0)} bytes for {name}, not {size}",
                hint="report this together with the job's log",
            )
