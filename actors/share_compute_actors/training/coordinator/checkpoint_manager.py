"""Saves the trained model: checkpoints while training continues, and the result when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray

from share_compute.errors import (
    ShareComputeError,
    StaleEpoch,
    Unavailable,
    VerificationFailed,
)
from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    Assignment,
    AttemptEvent,
    CheckpointSaved,
    Note,
)
from share_compute.protocol.membership import Worker
from share_compute.training.checkpoint_pace import CheckpointPace
from share_compute_actors.group.answering import ask_shard_store
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.group.exceptions import MembersLost
from share_compute_actors.messages import FolderKind
from share_compute_actors.training.coordinator.conductor import Conductor
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.training.preparation import suspended
from share_compute_actors.training.shard_store import SAVED, STATE_OF_TRAINING, TrainingState
from share_compute_actors.wire import FLAG

_RESULT = "model"


class _Saving(NamedTuple):
    """A folder that the shard store is writing."""

    folder: str
    kind: FolderKind
    step: int
    holders: tuple[Worker, ...]
    """Members that hold the snapshots, in their order."""
    answer: Any


class CheckpointManager:
    """Saves the model of a job through the shard store, one folder at a time.

    At a pause, the first member of each stage takes a snapshot. For a checkpoint, all members with a share of the
    optimizer's state take one; only the first also includes the weights. The shard store then fetches the snapshots and
    writes them. Training continues meanwhile if all snapshots are copies of the shards. All methods must be called on
    the thread that runs the attempt.

    Args:
        shard_store: the shard store's actor, which writes the folders.
        group: the members, which hold the model.
        conductor: pauses training, so that no step is computed while snapshots are taken.
        assignment: the attempt, with the job's folder and the period of checkpoints.
        report: receives events.
        requests: control requests of the control plane.
    """

    def __init__(
        self,
        shard_store: Any,
        group: TrainingGroup,
        conductor: Conductor,
        assignment: Assignment,
        report: Callable[[AttemptEvent], None],
        requests: ControlRequests,
    ) -> None:
        self._shard_store = shard_store
        self._group = group
        self._conductor = conductor
        self._place = assignment.folder
        self._requests = requests
        self._report = report
        self._under_way: _Saving | None = None
        self._whole: str | None = None
        """Last folder that was saved completely; it is not saved again."""
        self._has_reported_memory = False
        every_s = assignment.timed_checkpoints_s
        self._pace = None if every_s is None else CheckpointPace(every_s, time.monotonic())

    @property
    def _is_due(self) -> bool:
        """Whether a timed checkpoint is due, and no folder is being written."""
        pace, is_free = self._pace, self._under_way is None
        return pace is not None and is_free and pace.is_due(time.monotonic())

    def checkpoint(self, state: TrainingState, *, waits: bool) -> None:
        """Save a checkpoint; call this only while training is paused.

        Args:
            state: training state after the last committed step.
            waits: whether to wait until the checkpoint is complete. The call always waits if a machine lacks
                the memory for a copy of its shard.

        Raises:
            Cancelled: the submitter cancelled the job.
            ShareComputeError: the checkpoint could not be saved, for example because the disk is full.
        """
        began_s = time.monotonic()
        if self._pace is not None:
            self._pace = self._pace.began(began_s)
        self._save(f"checkpoints/step-{state.step:08}", "checkpoint", state, waits=waits)
        if self._pace is not None:
            self._pace = self._pace.paused(time.monotonic() - began_s)

    def checkpoint_if_due(self, state: TrainingState) -> None:
        """Save a checkpoint if a timed checkpoint is due or a suspension was requested.

        Call this only while training is paused.

        Raises:
            ContributorLost: a suspension was requested, and the checkpoint for it is complete.
            ShareComputeError: as `checkpoint` does.
        """
        self.suspend_if_requested(state)
        if self._is_due:
            self.checkpoint(state, waits=False)

    def suspend_if_requested(self, state: TrainingState) -> None:
        """If a suspension was requested, save a checkpoint and end the attempt; see `checkpoint_if_due`."""
        if self._requests.suspended.is_set():
            self.checkpoint(state, waits=True)
            raise suspended(f"after step {state.step}")

    def contribute(self, folder: str, state: TrainingState) -> None:
        """Save the branch's contribution to a merge; raise the same errors as `checkpoint`.

        Args:
            folder: path of the folder, relative to the job's folder.
            state: training state after the last committed step.
        """
        self._save(folder, "contribution", state, waits=True)

    def path(self, folder: str) -> Path:
        """Return the path of a folder that is relative to the job's folder."""
        return self._place / folder

    def result(self, state: TrainingState) -> None:
        """Save the trained model, and wait until it is saved; raise the same errors as `checkpoint`."""
        self._save(f"artifacts/{_RESULT}", "artifact", state, waits=True)

    def poll(self) -> None:
        """Report a save that has ended; request a pause for a due checkpoint or a requested suspension.

        Call it regularly while training continues.
        """
        saving = self._under_way
        if saving is not None and ray.wait([saving.answer], timeout=0)[0]:
            self._settle(saving)
        if self._is_due or self._requests.suspended.is_set():
            self._conductor.pause_early()

    def release(self, workers: Collection[Worker]) -> None:
        """Wait for a save in progress if it fetches a snapshot from a leaving member.

        Call this only while training is paused.
        """
        if self._under_way is not None and not set(workers).isdisjoint(self._under_way.holders):
            self._conductor.at_pause(self._finish)

    @contextmanager
    def salvaging(self) -> Iterator[None]:
        """On an error in the context, wait for a save in progress, because the next attempt may begin from its folder.

        Wait after `MembersLost`, and after each `ShareComputeError` except `StaleEpoch` and `Unavailable`.
        """
        try:
            yield
        except (StaleEpoch, Unavailable):
            raise  # no save to wait for: another coordinator has the members, or the folder cannot be written
        except (ShareComputeError, MembersLost):
            self._salvage()
            raise

    def _salvage(self) -> None:
        while self._under_way is not None:
            try:
                self._finish()
            except MembersLost:
                continue  # the shard store may already have the data of the lost members
            except ShareComputeError as failure:
                self._report(Note(message=failure.message, level="warning"))

    # -- at a pause --------------------------------------------------------------------------------------------------

    def _save(self, folder: str, kind: FolderKind, state: TrainingState, *, waits: bool) -> None:
        self._conductor.at_pause(partial(self._save_once, folder, kind, state, waits=waits))

    def _save_once(self, folder: str, kind: FolderKind, state: TrainingState, *, waits: bool) -> None:
        while True:
            self._finish()
            if self._whole == folder or self._begin(folder, kind, state, copies=not waits):
                return

    def _begin(self, folder: str, kind: FolderKind, state: TrainingState, *, copies: bool) -> bool:
        """Have members take snapshots, and start to save them; return whether all snapshots are copies of shards."""
        membership = self._conductor.membership
        holders = [
            worker
            for place, stage in enumerate(membership.stages)
            for worker in (stage if kind == "checkpoint" and membership.has_shares(place) else stage[:1])
        ]
        first = {worker: place for place, worker in enumerate(holders)}
        are_copies = self._group.gather(
            FLAG,
            {
                worker: self._group.handle(worker).snapshot.remote(place, kind, copies=copies)
                for worker, place in first.items()
            },
        )
        names = [self._group.name(worker) for worker in first]
        members = [self._group.handle(worker) for worker in first]
        answer = self._shard_store.save.remote(folder, kind, STATE_OF_TRAINING.pack(state), names, *members)
        self._under_way = _Saving(folder, kind, state.step, tuple(first), answer)
        if copies and not all(are_copies.values()) and not self._has_reported_memory:
            self._has_reported_memory = True
            short = ", ".join(sorted(self._group.name(worker) for worker in first if not are_copies[worker]))
            message = f"training waits for its checkpoints: no memory for a copy of the shard of {short}"
            self._report(Note(message=message))
        return all(are_copies.values())

    def _finish(self) -> None:
        """Wait for the folder that is being written, if there is one."""
        saving = self._under_way
        if saving is None:
            return
        self._group.wait([saving.answer])
        self._settle(saving)

    def _settle(self, saving: _Saving) -> None:
        """Report whether the folder was saved completely, and accuse a member that sent malformed data."""
        self._under_way = None
        if self._pace is not None:
            self._pace = self._pace.written(time.monotonic())
        saved = ask_shard_store(SAVED, saving.answer)
        if saved.culprit is not None and saving.holders[saved.culprit] in self._group.workers:
            self._group.detector.accuse(saving.holders[saved.culprit], VerificationFailed(saved.fault))
        size_bytes = saved.size_bytes
        if size_bytes is None:
            why = saved.fault or "a machine was lost before its part was fetched"
            message = f"the state of step {saving.step} could not be saved completely: {why}"
            self._report(Note(message=message, level="warning"))
            return
        self._whole = saving.folder
        path = self._place / saving.folder
        match saving.kind:
            case "checkpoint":
                self._report(CheckpointSaved(step=saving.step, path=path, size_bytes=size_bytes))
            case "artifact":
                self._report(ArtifactSaved(name=_RESULT, path=path, size_bytes=size_bytes))
            case "contribution":
                pass  # the synchronizer reports the merge
