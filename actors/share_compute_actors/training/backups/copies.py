"""Manages the backup copies that one member keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor

from share_compute.errors import (
    ContributorLost,
    NoCopy,
    ShareComputeError,
    StaleEpoch,
    Unavailable,
    VerificationFailed,
    as_ours,
)
from share_compute.protocol.membership import ShardPart, Worker
from share_compute.specification import TrainingSpec
from share_compute_actors.messages import Followed
from share_compute_actors.training.backups.copy_quota import CopyQuota, is_out_of_space
from share_compute_actors.training.backups.copying import Copied, Legacy, ShardOutline
from share_compute_actors.training.backups.followers import Follower
from share_compute_actors.training.backups.logs import HEAD, GradientLogHeader
from share_compute_actors.transport.envelope import WireLabel
from share_compute_actors.transport.pieces import Piece
from share_compute_actors.transport.traffic import Traffic

_POLL_S = 0.2
_OUTLINE_S = 5.0


class RemotePrimary:
    """A primary on another machine, called through Ray; implements `Primary`.

    Args:
        traffic: counter and limit of received bytes.
        actor: the primary's actor.
        backup: the backup member that keeps the copy.
        stopping: event that cancels pending calls, which then raise `StaleEpoch`.
    """

    def __init__(
        self, traffic: Traffic, actor: Any, backup: Worker, stopping: threading.Event | _Deadline
    ) -> None:
        self._traffic = traffic
        self._actor = actor
        self._backup = backup
        self._stopping = stopping

    def outline(self, shard: ShardPart) -> ShardOutline:
        """See `Copier.outline`."""
        outline: ShardOutline = self._ask("outline", shard)
        return outline

    def copy(self, shard: ShardPart, names: Sequence[str]) -> Copied:
        """See `Copier.copy`."""
        copied: Copied = self._ask("stage_copy", self._backup, shard, names)
        return copied

    def piece(self, ticket: int, name: str, start: int, stop: int) -> Piece:
        """See `Copier.piece`."""
        self._traffic.receive(stop - start)
        piece: Piece = self._ask("staged_piece", ticket, name, start, stop)
        return piece

    def _ask(self, method: str, *arguments: Any) -> Any:
        ref = getattr(self._actor, method).remote(*arguments)
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            if self._stopping.is_set():
                raise StaleEpoch("the copy was cancelled", hint="no action needed: training continues")
        try:
            return ray.get(ref)
        except RayTaskError as failure:
            if isinstance(failure.cause, ShareComputeError):
                raise failure.cause from failure
            raise
        except RayActorError as failure:
            raise ContributorLost(
                "a machine was lost while its part of the model was copied",
                hint="resume the job if it does not continue by itself",
            ) from failure


class _Deadline:
    """Time limit that replaces the event of a `RemotePrimary`; `is_set` returns True after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._until_s = time.monotonic() + seconds

    def is_set(self) -> bool:
        return time.monotonic() > self._until_s


class Copies:
    """All backup copies that one member keeps.

    All methods except `outlines`, `of`, `catch_up` and `are_whole` must be called on the compute thread.

    Args:
        backup: this member.
        training: training settings of the job.
        device: device on which copies are updated.
        notify: called with each error, from any thread.
        quota: limits the space that all copies take.
        reach: returns the interface to a primary, given the primary's actor, the id of this member, and an event that
            cancels pending calls: by default a `RemotePrimary` with the member's traffic.
    """

    def __init__(
        self,
        backup: Worker,
        training: TrainingSpec,
        device: torch.device,
        notify: Callable[[ShareComputeError], None],
        quota: CopyQuota,
        reach: Callable[[Any, Worker, threading.Event | _Deadline], Any],
    ) -> None:
        self._backup = backup
        self._training = training
        self._device = device
        self._notify = notify
        self._quota = quota
        self._reach = reach
        self.former: Legacy | None = None
        """State of this member's previous shard, between `TrainingEngine.equip` and `keep`; otherwise None.

        Also None if this state lacks updates that the current shard includes."""
        self._epoch = 0
        self._followers: dict[ShardPart, Follower] = {}
        self._followed: dict[int, Followed] = {}
        """Primaries whose shards are copied, by index of their stage."""
        self._came: dict[tuple[int, int], set[int]] = {}
        """Indices of the gradient messages (see `gradient_messages`) that arrived in this epoch, by stage and step."""
        self._wanted: dict[tuple[int, int], int] = {}
        """Number of messages of a gradient, by stage and step; only for gradients whose header has arrived."""
        self._outdated_since: int | None = None
        """Last step before a merge changed the primaries' weights; None if all copies began after the last merge."""

    def outlines(self, committed: int, followed: Mapping[int, Followed]) -> dict[ShardPart, ShardOutline]:
        """Ask primaries for outlines of shards whose copies can start from local data; return the outlines by shard.

        Do not call this on the compute thread, because it waits for the primaries. An outline is left out if its
        primary is lost, does not hold the shard or does not answer within 5 s.

        Args:
            committed: last committed step.
            followed: primaries whose shards this member will copy, by stage.
        """
        legacies = self._legacies(committed, self._followers.values())
        found: dict[ShardPart, ShardOutline] = {}
        for one in followed.values():
            start, stop = one.shard[:2]
            if one.shard in self._followers or not any(
                each.shard[0] < stop and start < each.shard[1] for each in legacies
            ):
                continue
            # On an error, `Follower.follow` requests the outline later, and fetches all data.
            with suppress(StaleEpoch, ContributorLost):
                owner = self._reach(one.actor, self._backup, _Deadline(_OUTLINE_S))
                found[one.shard] = owner.outline(one.shard)
        return found

    def _legacies(self, committed: int, followers: Iterable[Follower]) -> list[Legacy]:
        kept = (follower.legacy(committed) for follower in followers)
        return [one for one in (self.former, *kept) if one is not None and one.step == committed]

    def keep(
        self,
        epoch: int,
        committed: int,
        followed: Mapping[int, Followed],
        outlines: Mapping[ShardPart, ShardOutline] | None = None,
    ) -> None:
        """Keep copies of exactly these primaries' shards, and drop all other copies.

        Args:
            epoch: number of the epoch that is about to begin.
            committed: last committed step. A new copy replaces a copy that cannot be brought to this step. If the
                primary of a shard has changed, copies behind this step are replaced, too.
            followed: primaries whose shards to copy, by stage.
            outlines: outlines of shards whose new copies start from local data. They are used only if there
                is space for all these copies.
        """
        wanted = {one.shard: one.owner for one in followed.values()}
        owners = {one.shard: one.owner for one in self._followed.values()}
        kept = {
            shard: follower
            for shard, follower in self._followers.items()
            if shard in wanted
            and follower.reaches(committed)
            # A primary sends the update factor of a step with its next gradient. A new primary may not know the
            # factor, so a copy that still lacks the factor cannot continue.
            and (wanted[shard] == owners[shard] or follower.is_at(committed))
        }
        dropped = [self._followers[shard] for shard in self._followers.keys() - kept.keys()]
        legacies = self._legacies(committed, dropped)
        outlines = outlines if outlines and self._has_space(outlines.values()) else {}
        fresh = {shard: self._new(shard) for shard in wanted.keys() - kept.keys()}
        copying = [
            fresh[shard].inherit(outlines[shard], legacies) for shard in fresh.keys() & outlines.keys()
        ]
        for follower in dropped:
            follower.close(copying)
        kept |= fresh
        self.former = None
        for follower in kept.values():
            follower.forget_after(committed)  # primaries resend the gradient of the open step
        self._epoch, self._followers, self._followed = epoch, kept, dict(followed)
        self._follow_all()

    def _new(self, shard: ShardPart) -> Follower:
        return Follower(shard, self._training, self._device, partial(self._fail, shard), self._quota)

    def _follow_all(self) -> None:
        """Start to fetch missing data, and count the messages of gradients from 0."""
        self._came.clear()
        self._wanted.clear()
        for one in self._followed.values():
            primary = partial(self._reach, one.actor, self._backup)
            self._followers[one.shard].follow((one.owner, one.actor), primary)

    def outdate(self, step: int) -> None:
        """Note that a merge changes the primaries' weights without a gradient.

        The copies stay, because they are needed if a primary dies before all members have merged. The first gradient of
        a later step calls `restart`, if nothing did before.

        Args:
            step: last step that the primaries have applied.
        """
        self._outdated_since = step

    def restart(self) -> None:
        """Drop all copies, and copy the same primaries' shards again, with their weights after a merge."""
        self._outdated_since = self.former = None
        released = [each for each in (old.close() for old in self._followers.values()) if each is not None]
        self._followers = {shard: self._new(shard) for shard in self._followers}
        for follower in self._followers.values():
            follower.begin_after(released)  # the space of earlier copies is free at this point
        self._follow_all()

    def _has_space(self, outlines: Iterable[ShardOutline]) -> bool:
        """Return whether there is space for new copies with these outlines."""
        state_tensors = self._training.state_tensors
        try:
            self._quota.require(sum(outline.copy_bytes(state_tensors) for outline in outlines))
        except Unavailable:
            return False
        return True

    def of(self, shard: ShardPart) -> Follower | None:
        """Return the copy of a shard; None if this member keeps no copy of it."""
        return self._followers.get(shard)

    def catch_up(self) -> bool:
        """Have each complete copy apply its pending gradients once, in the background.

        Return whether all usable copies are complete and have finished this work.
        """
        behind = [one for one in self._followers.values() if not (one.is_spoilt or one.catch_up())]
        return not behind

    def are_whole(self) -> bool:
        """Return whether each copy is complete and usable."""
        return all(one.is_whole for one in self._followers.values())

    def misfit(self, label: WireLabel, tensor: Tensor) -> str | None:
        """Return the defect of a message of a primary's gradient, as text; None if the message is valid."""
        followed = self._followed.get(label.stage)
        if followed is None or followed.shard not in self._followers:
            return "nobody keeps a copy of the gradient that it sent"
        what = self._followers[followed.shard].misfit(label.microbatch, tensor)
        return None if what is None else f"the gradient that it sent to its backup: {what}"

    def take(self, label: WireLabel, tensor: Tensor) -> Followed | None:
        """Store one message of a primary's gradient. If the message cannot be stored, mark the copy as unusable.

        Return None until all messages of the gradient have arrived in this epoch. Then return the primary, so that the
        caller can acknowledge the gradient.
        """
        if self._outdated_since is not None and label.step > self._outdated_since:
            self.restart()
        followed, key = self._followed[label.stage], (label.stage, label.step)
        follower = self._followers[followed.shard]
        try:
            follower.take(label.step, label.microbatch, tensor)
        except Unavailable as failure:  # the gradient is acknowledged anyway, so that training does not wait
            follower.spoil()
            self._fail(followed.shard, failure)
        came = self._came.setdefault(key, set())
        came.add(label.microbatch)
        if label.microbatch == HEAD:
            self._wanted[key] = GradientLogHeader.unpack(tensor).buckets + 1
        if len(came) != self._wanted.get(key):
            return None
        del self._came[key], self._wanted[key]
        return followed

    def _fail(self, shard: ShardPart, failure: Exception) -> None:
        lacks_space = is_out_of_space(failure)
        if not (lacks_space or isinstance(failure, (ContributorLost, VerificationFailed))):
            self._notify(as_ours(failure))
            return
        owner = next((one.owner for one in self._followed.values() if one.shard == shard), "")
        hint = "free space in this machine's folder for temporary files, and memory"
        self._notify(
            NoCopy(
                f"no backup copy of another machine's shard is kept here for now: {failure}",
                hint=hint if lacks_space else "no action needed: another copy starts soon",
                details={"lacks_space": lacks_space, "epoch": self._epoch, "owner": owner},
            )
        )
