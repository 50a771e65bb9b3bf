"""Membership of an epoch: the members of each stage, and the cells that each member must run.

An epoch is a period in which the members of a job and their layers stay the same, not a pass over the data. A cell is
the forward or the backward of one microbatch in one stage. The open step is the first step that is not committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

Worker = str
"""Name of a member: the id of the machine that it runs on."""


class ShardPart(NamedTuple):
    """The state that a member keeps: layers [start, stop), and a share of the optimizer's state for them."""

    start: int
    stop: int
    number: int = 0
    """Index of the share."""
    total: int = 1
    """Number of shares; 1 if the member keeps the whole state of these layers."""


class Task(NamedTuple):
    """Work on one microbatch in one stage: the member that computes it, and the cells that this member must run."""

    worker: Worker
    forward: bool = True
    backward: bool = True
    adds: bool = True
    """Whether the backward adds to the gradient. If not, it only recomputes a tensor for the previous stage."""
    holder: Worker | None = None
    """Member whose gradient sum already includes the microbatch; None if there is no such member."""


class Resend(NamedTuple):
    """A tensor that ``holder`` kept, and that ``target``, a member of an adjacent stage, needs again."""

    holder: Worker
    cargo: Literal["activation", "gradient"]
    microbatch: int
    stage: int
    """Index of the stage of ``holder``."""
    target: Worker


Tasks = tuple[tuple[Task, ...], ...]
"""Tasks of one step, ``[stages][microbatches]``."""


@dataclass(frozen=True)
class Membership:
    """The membership of one epoch.

    Args:
        epoch: number of the epoch in its job; later epochs have larger numbers.
        shards: layers [start, stop) of each stage.
        stages: members of each stage, in order.
        owners: member that computes each microbatch in each stage, ``[stages][microbatches]``, in all steps of the
            epoch after the open one.
        step: the open step, with which the epoch begins.
        tasks: cells of the open step, ``[stages][microbatches]``; some may already be done.
        resends: kept tensors that the cells of the open step need.
        forgets: members that must discard their results of the open step, since their gradient sums overlap with
            those of other members.
        reduced: members that hold the reduced gradient of the open step, by stage. Other members of the stage copy it
            from the first one.
        backups: backup of each member that has one; it holds a copy of the member's state.
        followers: catch-up replicas of each member, which copy the member's state before they take over layers from it.
        is_tied: whether the first and the last stage share a parameter.
        shares_optimizer: whether each member of a stage keeps a share of the optimizer's state, and updates the
            parameters of this share only. Members of a stage then send each other the updated weights.
        slices: number of slices of each sequence. With several, microbatch ``slice * parts + part`` is one slice of the
            sequences of one part of the batch, and the members of a stage compute all slices of a part together.
    """

    epoch: int
    shards: tuple[tuple[int, int], ...]
    stages: tuple[tuple[Worker, ...], ...]
    owners: tuple[tuple[Worker, ...], ...]
    step: int
    tasks: Tasks
    resends: tuple[Resend, ...] = ()
    forgets: frozenset[Worker] = frozenset()
    reduced: Mapping[int, tuple[Worker, ...]] = field(default_factory=dict)
    backups: Mapping[Worker, Worker] = field(default_factory=dict)
    followers: Mapping[Worker, tuple[Worker, ...]] = field(default_factory=dict)
    is_tied: bool = False
    shares_optimizer: bool = False
    slices: int = 1

    @property
    def parts(self) -> int:
        """Number of parts of a batch; without slices, each microbatch is one."""
        return len(self.owners[0]) // self.slices

    def together(self, worker: Worker, microbatch: int) -> tuple[int, ...]:
        """Return the microbatches of the same part that a member computes together, in order."""
        if self.slices == 1:
            return (microbatch,)
        part, owners = microbatch % self.parts, self.owners[self.stage_of(worker)]
        return tuple(each for each in range(part, len(owners), self.parts) if owners[each] == worker)

    def holders_of_slices(self, worker: Worker) -> tuple[int, ...]:
        """Return, for each slice, the index in the stage of the member that computes it."""
        place = self.stage_of(worker)
        return tuple(self.stages[place].index(each) for each in self.owners[place][:: self.parts])

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All members that are in a stage, in the order of the stages."""
        return tuple(worker for stage in self.stages for worker in stage)

    @property
    def everybody(self) -> tuple[Worker, ...]:
        """All members that are in a stage, then the catch-up replicas that are in no stage."""
        members = self.workers
        comers = {follower for followers in self.followers.values() for follower in followers}
        return members + tuple(sorted(comers - set(members)))

    def copy_holders(self, owner: Worker) -> tuple[Worker, ...]:
        """Return the members that hold a copy of a member's state: its backup, if any, then its catch-up replicas."""
        backup = self.backups.get(owner)
        followers = (follower for follower in self.followers.get(owner, ()) if follower != backup)
        return (*(() if backup is None else (backup,)), *followers)

    def stage_of(self, worker: Worker) -> int:
        """Return the index of a member's stage; raise ValueError if the member is in no stage."""
        for place, stage in enumerate(self.stages):
            if worker in stage:
                return place
        raise ValueError(f"{worker} is in no stage of epoch {self.epoch}")

    def shard_of(self, worker: Worker) -> tuple[int, int]:
        """Return the layers [start, stop) of a member; raise ValueError if the member is in no stage."""
        return self.shards[self.stage_of(worker)]

    def share_of(self, worker: Worker) -> tuple[int, int]:
        """Return the index of a member's share of its stage's optimizer state, and the number of shares."""
        stage = self.stages[self.stage_of(worker)]
        return (stage.index(worker), len(stage)) if self.shares_optimizer else (0, 1)

    def part_of(self, worker: Worker) -> ShardPart:
        """Return the layers of a member and its share; raise ValueError if the member is in no stage."""
        return ShardPart(*self.shard_of(worker), *self.share_of(worker))

    def has_shares(self, place: int) -> bool:
        """Return whether the members of a stage keep different shares of the optimizer's state."""
        return self.shares_optimizer and len(self.stages[place]) > 1

    @property
    def sole_holders(self) -> tuple[Worker, ...]:
        """Members that alone hold some state: each member that has no other in its stage, or keeps a share."""
        return tuple(
            worker
            for place, stage in enumerate(self.stages)
            if len(stage) == 1 or self.has_shares(place)
            for worker in stage
        )

    def tasks_of(self, step: int) -> Tasks:
        """Return the tasks of a step of this epoch."""
        return self.tasks if step == self.step else self._fresh

    @cached_property
    def _fresh(self) -> Tasks:
        """Tasks of the later steps of the epoch."""
        return fresh(self.owners)


def fresh(owners: Sequence[Sequence[Worker]]) -> Tasks:
    """Return the tasks of a step in which no cell is done yet."""
    return tuple(tuple(Task(worker) for worker in stage) for stage in owners)
