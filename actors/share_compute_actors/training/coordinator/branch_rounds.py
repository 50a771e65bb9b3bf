"""The merges of one branch with the other branches, which happen while training is paused."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from share_compute.errors import ContributorLost
from share_compute.lifecycle.attempt_events import Assignment
from share_compute.protocol.membership import Worker
from share_compute.synchronization.aggregators import aggregator_of
from share_compute_actors.group.answering import ask_shard_store
from share_compute_actors.group.exceptions import Cancelled, MembersLost
from share_compute_actors.training.coordinator.branch_ranges import BranchRanges, Sent
from share_compute_actors.training.coordinator.checkpoint_manager import CheckpointManager
from share_compute_actors.training.coordinator.conductor import Conductor
from share_compute_actors.training.coordinator.connections import Connections
from share_compute_actors.training.member.schemas import VERSION
from share_compute_actors.training.membership.protection import ProtectionWatch
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.training.rounds.messages import BranchReport, BranchUpdate, BranchUpdates
from share_compute_actors.training.shard_store import TrainingState
from share_compute_actors.training.step_log import StepLog
from share_compute_actors.wire import NOTHING, Schema

_POLL_S = 0.2
"""Interval at which a branch that waits for a merge checks its members, in seconds."""

T = TypeVar("T")


class BranchRounds:
    """Merges a branch with the other branches at the end of each round.

    All steps of a merge can be repeated: a contribution follows from the weights, and a member that has an update
    ignores it. So a coordinator or a member may be lost at any point.

    Args:
        assignment: the attempt at the branch.
        connections: connections with the synchronizer and the control plane.
        group: the members.
        conductor: runs the calls of members while training is paused.
        checkpoints: saves contributions.
        shard_store: the shard store's actor, which serves updates.
        step_log: the step log of the branch.
        protection: watches the members' backup copies.
    """

    def __init__(
        self,
        assignment: Assignment,
        connections: Connections,
        group: TrainingGroup,
        conductor: Conductor,
        checkpoints: CheckpointManager,
        shard_store: Any,
        step_log: StepLog,
        protection: ProtectionWatch,
    ) -> None:
        assert assignment.branch is not None
        assert assignment.spec.training.rounds is not None
        self._branch = assignment.branch
        self._folder = assignment.folder
        self._training = assignment.spec.training
        self._policy = assignment.spec.training.rounds
        self._open: tuple[int, int] | None = None
        """Last step of the round that is being merged, and the version with which it began; None if there is none."""
        self._connections = connections
        self._group = group
        self._conductor = conductor
        self._checkpoints = checkpoints
        self._shard_store = shard_store
        self._step_log = step_log
        self._protection = protection
        self._ranges = BranchRanges(assignment, connections, group, conductor, checkpoints)
        self.merged: Path | None = None
        """Folder of the merged weights after the last merge, if this branch has others and evaluates them."""

    def contribute(self, state: TrainingState, contributed: Callable[[], None]) -> None:
        """Contribute to a merge at the end of a round; this may be repeated.

        Call this only while training is paused.

        Args:
            state: training state after the last step of the round.
            contributed: called when the contribution is on the server, before the synchronizer is notified.

        Raises:
            ShareComputeError: the branch cannot continue.
        """
        versions = self._versions()
        base = self._step_log.begin_merge(state.step, min(versions))
        if min(versions) > base:
            self._leave_out(state.step, min(versions))
            return
        self._open = state.step, base
        if self._policy.overlapping:
            self._ask_all(NOTHING, "end_round", base)
            self._renew_copies(state)
        # If a member has merged, the merge was interrupted after the contribution had arrived.
        self._send(base + 1, state, contributed, has_arrived=max(versions) > base)

    def _send(
        self, number: int, state: TrainingState, contributed: Callable[[], None], *, has_arrived: bool
    ) -> None:
        """Send the contribution to a round to the place of its merge, and report it to the synchronizer."""
        if self._policy.ranges == 0:
            folder = f"contributions/{number:08}"
            if not has_arrived:
                self._checkpoints.contribute(folder, state)
            sent = Sent(folder=self._checkpoints.path(folder))
        else:
            sent = Sent() if has_arrived else self._ranges.send(number, state)
        contributed()
        self._report(number, sent, state)

    def _leave_out(self, step: int, version: int) -> None:
        """End a round whose merge all members have, because a coordinator ended or they began with a version."""
        self._step_log.end_merge(step)
        if self._policy.keeps_own_weights and self._branch.number == 0:
            aggregator = aggregator_of(self._folder / "rounds", self._training)
            self.merged = aggregator.version_folder(version)

    def merge(self, state: TrainingState, contributed: Callable[[], None]) -> bool:
        """Wait for the merge of the round that ended last, and apply it; return whether all rounds are merged.

        Call this only while training is paused, after `contribute`.

        Args:
            state: training state after the last step.
            contributed: see `contribute`.

        Raises:
            Cancelled: the submitter cancelled the job.
            ContributorLost: a suspension was requested.
            ShareComputeError: the branch cannot continue.
        """
        assert self._open is not None
        end, base = self._open
        updates = self._conductor.at_pause(partial(self._wait, base, state))
        while updates.repeats:
            self._send(base + 1, replace(state, step=end), contributed, has_arrived=False)
            updates = self._conductor.at_pause(partial(self._wait, base, state))
        for number, update in enumerate(updates.updates):
            self._apply(update, closes_round=number == 0)
        self._renew_copies(state)
        self._step_log.end_merge(end)
        self._open, self.merged = None, updates.merged
        return updates.is_over

    def _apply(self, update: BranchUpdate, *, closes_round: bool) -> None:
        """Let all members apply an update, from the machines with its ranges or from the server."""
        ask = partial(
            self._ask_all, NOTHING, "merge", update.version, update.before, closes_round=closes_round
        )
        sources = self._ranges.sources(update)
        if sources is not None:
            try:
                ask(ranges=sources)
            except ContributorLost:
                sources = None  # a machine was lost; members that already have the update ignore it
        if sources is None:
            ask_shard_store(NOTHING, self._shard_store.use_update.remote(str(update.folder)))
            ask()

    def resume(self, state: TrainingState, contributed: Callable[[], None]) -> None:
        """Contribute again to the merge that was open when an earlier coordinator ended, if there is one.

        Args:
            state: training state after the last committed step.
            contributed: see `contribute`.
        """
        end = self._step_log.open_merge
        if end is not None and end < state.step:
            self.contribute(replace(state, step=end), contributed)

    @property
    def is_open(self) -> bool:
        """Whether a round has ended whose merge is not applied."""
        return self._open is not None

    def is_due(self, step: int) -> bool:
        """Return whether the open merge must be applied after a step, because the overlap ends."""
        return self._open is not None and step >= self._open[0] + self._policy.overlapping

    def _renew_copies(self, state: TrainingState) -> None:
        # Backup copies lack the change of the merge, so later steps would be added to the old weights.
        self._ask_all(NOTHING, "restart_copies")
        self._protection.lose_copy(state.step)
        self._protection.reform(self._conductor.membership)

    def _versions(self) -> list[int]:
        """Return the number of merges that each member's weights include."""
        found = self._ask_all(VERSION, "version")
        return [version for version in found if version is not None]

    def _ask_all(self, schema: Schema[T], method: str, *arguments: Any, **options: Any) -> Collection[T]:
        """Call a method of all members, and return their answers; repeat the calls if members are lost."""

        def ask() -> Collection[T]:
            handles = {worker: self._group.handle(worker) for worker in self._members()}
            calls = {
                worker: getattr(handle, method).remote(*arguments, **options)
                for worker, handle in handles.items()
            }
            return self._group.gather(schema, calls).values()

        return self._conductor.at_pause(ask)

    def _members(self) -> Collection[Worker]:
        return self._conductor.membership.everybody

    def _report(self, number: int, sent: Sent, state: TrainingState) -> None:
        first = (state.step - 1) // self._policy.every * self._policy.every
        steps = [facts.event for facts in self._step_log.steps(after=first) if facts.event.step <= state.step]
        report = BranchReport(
            branch=self._branch.number,
            start=self._branch.start,
            round=number,
            folder=sent.folder,
            key=sent.key,
            parts=sent.parts,
            fault=sent.fault,
            samples=(state.step - first) * self._training.batch_size,
            loss=sum(step.loss for step in steps) / len(steps) if steps else None,
            seconds=sum(step.seconds for step in steps),
        )
        self._connections.synchronizer.contributed.remote(report.model_dump_json())

    def _wait(self, base: int, state: TrainingState) -> BranchUpdates:
        """Wait until the synchronizer has updates after the base, while all members are alive."""
        while True:
            try:
                updates = self._connections.updates.get(timeout=_POLL_S)
            except queue.Empty:
                lost = self._group.check_members()
                if lost:
                    raise MembersLost(lost) from None
                if self._connections.requests.cancelled.is_set():
                    raise Cancelled from None
                self._checkpoints.suspend_if_requested(state)
            else:
                if updates.base == base:
                    return updates
