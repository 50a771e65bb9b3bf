"""Who does what: the members of an epoch, and the cells of its first step, some of which may be done already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

Worker = str
"""A member, by the contributor that it runs on."""


class Task(NamedTuple):
    """What is to be done of one microbatch at one pool."""

    worker: Worker
    forward: bool = True
    backward: bool = True
    adds: bool = True
    """Whether the backward adds to the gradient; else it only serves the pool before, which lost what it was sent."""
    holder: Worker | None = None
    """Who holds the gradient already, when nothing is added to it now."""


class Resend(NamedTuple):
    """A kept boundary tensor that somebody needs again."""

    keeper: Worker
    cargo: Literal["activation", "gradient"]
    microbatch: int
    pool: int
    """Pool of the keeper."""
    target: Worker


Tasks = tuple[tuple[Task, ...], ...]
"""By pool and microbatch."""


@dataclass(frozen=True)
class Roster:
    """The members of one epoch.

    Args:
        epoch: of this job; later ones are larger.
        shards: layers [start, stop) of each pool.
        pools: members of each pool, in order.
        owners: who computes each microbatch in each pool, ``[pools][microbatches]``, in all steps but the first.
        step: the open step, with which the epoch begins.
        tasks: cells of that step.
        resends: kept tensors that its cells need.
        forgets: members that drop what they have of that step, since others have added the same microbatches.
        reduced: members that hold the reduced gradient of that step, by pool; the others copy it from the first.
        buddies: who keeps a copy of what a member holds that is alone in its pool.
        followers: who keeps a copy of what a member holds for a while, since it is about to hold some of it itself.
        is_tied: whether the first and the last pool share a parameter.
    """

    epoch: int
    shards: tuple[tuple[int, int], ...]
    pools: tuple[tuple[Worker, ...], ...]
    owners: tuple[tuple[Worker, ...], ...]
    step: int
    tasks: Tasks
    resends: tuple[Resend, ...] = ()
    forgets: frozenset[Worker] = frozenset()
    reduced: Mapping[int, tuple[Worker, ...]] = field(default_factory=dict)
    buddies: Mapping[Worker, Worker] = field(default_factory=dict)
    followers: Mapping[Worker, tuple[Worker, ...]] = field(default_factory=dict)
    is_tied: bool = False

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All members, in order."""
        return tuple(worker for pool in self.pools for worker in pool)

    @property
    def everybody(self) -> tuple[Worker, ...]:
        """All members, then those in no pool that follow a member."""
        members = self.workers
        comers = {follower for followers in self.followers.values() for follower in followers}
        return members + tuple(sorted(comers - set(members)))

    def keepers(self, owner: Worker) -> tuple[Worker, ...]:
        """Return who keeps a copy of what a member holds: its buddy, if it has one, then those that follow it."""
        buddy = self.buddies.get(owner)
        followers = (follower for follower in self.followers.get(owner, ()) if follower != buddy)
        return (*(() if buddy is None else (buddy,)), *followers)

    def pool_of(self, worker: Worker) -> int:
        """Return the pool of a member; ValueError when it is in none."""
        for place, pool in enumerate(self.pools):
            if worker in pool:
                return place
        raise ValueError(f"{worker} is in no pool of epoch {self.epoch}")

    def shard_of(self, worker: Worker) -> tuple[int, int]:
        """Return the layers [start, stop) of a member; ValueError when it is in no pool."""
        return self.shards[self.pool_of(worker)]

    def tasks_of(self, step: int) -> Tasks:
        """Return the cells of a step of this epoch."""
        return self.tasks if step == self.step else self._fresh

    @cached_property
    def _fresh(self) -> Tasks:
        """Cells of every step but the first: asked for at each cell, so made once."""
        return fresh(self.owners)


def fresh(owners: Sequence[Sequence[Worker]]) -> Tasks:
    """Return the cells of a step of which nothing is done."""
    return tuple(tuple(Task(worker) for worker in pool) for pool in owners)
