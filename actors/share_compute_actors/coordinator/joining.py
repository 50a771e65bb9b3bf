"""A better plan on its way: its machines are started and brought up to date while the others train.

First the job asks for machines that it adds, by telling of the plan; they are started once the control plane answers
that they are the job's.

Then each member that is to hold layers that it does not hold, or to keep a copy of them, follows a member of each pool
that has some of them, as a buddy does: what that member holds comes piece by piece, with the gradients of the steps
that are taken meanwhile. Only when all have caught up, steps pause for the new plan. There is little left to bring
then, and copies begin with what is there already, so that no loss of one machine costs a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray

from share_compute.jobs.events import ReplanProposed
from share_compute.planning.drift import have_same_shards
from share_compute.planning.planner import Solution
from share_compute.planning.words import listed
from share_compute.protocol.roster import Roster, Worker
from share_compute.topology import Topology
from share_compute_actors.coordinator.crew import Crew
from share_compute_actors.coordinator.rosters import pools_of, shards_of

Heirs = Mapping[Worker, Sequence[tuple[int, int]]]
"""By member: the shards of which it will keep a copy."""


class Joining:
    """One plan that waits for its machines.

    Args:
        crew: the members.
        solution: the plan.
        proposed: how it was told of.
        heirs: tells for a plan and the roster before it which copies members will keep.
        can_follow: whether members can be followed while they train; else shards are loaded while steps pause.
    """

    def __init__(
        self,
        crew: Crew,
        solution: Solution,
        proposed: ReplanProposed,
        heirs: Callable[[Solution, Roster], Heirs] = lambda _solution, _roster: {},
        *,
        can_follow: bool = True,
    ) -> None:
        self._crew = crew
        self._heirs = heirs
        self._can_follow = can_follow
        self.solution = solution
        self._proposed = proposed
        self._is_linked = False
        """Whether an epoch was formed since all its machines are there, so that those to come can catch up."""
        self._followers: dict[Worker, tuple[Worker, ...]] = {}
        self._asked: dict[Any, Worker] = {}
        """Questions whether a machine has caught up, that are not answered yet."""
        self.is_ready = False
        """Whether the next epoch can carry it out."""

    @property
    def machines(self) -> frozenset[Worker]:
        """All that hold a part in the plan."""
        return frozenset(worker for pool in pools_of(self.solution.plan) for worker in pool)

    @property
    def why(self) -> str:
        """Why it is better, for people."""
        return self._proposed.sentence

    def names(self, workers: Collection[Worker]) -> str:
        """Return the names of those of its machines that are among these, for people."""
        members = (member for pool in self.solution.plan.pools for member in pool.members)
        return listed(sorted(member.name for member in members if member.contributor_id in workers))

    def takes(self, solution: Solution, proposed: ReplanProposed) -> bool:
        """Carry out other shares of microbatches with the same machines; return whether that is all that differs."""
        is_like = have_same_shards(self.solution.plan, solution.plan)
        if is_like:
            self.solution, self._proposed = solution, proposed
        return is_like

    def lacking(self, usable: Topology) -> frozenset[Worker]:
        """Return those of its machines that are neither there nor to be had."""
        return self.machines - self._crew.workers - {machine.id for machine in usable.contributors}

    def needs_epoch(self, usable: Topology, roster: Roster, granted: int | None) -> bool:
        """Bring it forward; return whether another epoch is needed for what comes next.

        Args:
            usable: machines that may be started.
            roster: of the epoch.
            granted: step of the proposal whose machines are the job's: before that, none is started.
        """
        missing = self.machines - self._crew.workers
        if missing and granted != self._proposed.step:
            return False
        if missing:
            shards = {
                member.contributor_id: self.solution.plan.shard(place)
                for place, pool in enumerate(self.solution.plan.pools)
                for member in pool.members
            }
            self._crew.invite({worker: shards[worker] for worker in missing}, usable)
            return False
        if not self._is_linked:
            self.is_ready = not self._follows(roster)
        if not self._is_linked or self.is_ready:
            return True
        if not self._asked:
            self._asked = self._crew.ask_following(
                {follower for followers in self._followers.values() for follower in followers}
            )
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        if len(answered) < len(self._asked):
            return False
        asked, self._asked = self._asked, {}
        self.is_ready = all(self._crew.is_affirmed(worker, ref) for ref, worker in asked.items())
        return self.is_ready

    def _follows(self, roster: Roster) -> dict[Worker, tuple[Worker, ...]]:
        if not self._can_follow:
            return {}
        topology = self._crew.topology
        heirs = self._heirs(self.solution, roster)
        return follows(roster, self.solution, lambda one: topology[one].device.kind, heirs)

    def followers(self, roster: Roster) -> dict[Worker, tuple[Worker, ...]]:
        """Return by member who is to follow it in an epoch that is being formed."""
        self._is_linked, self._asked = self.machines <= self._crew.workers, {}
        if not self._is_linked:
            self._followers, self.is_ready = {}, False
            return {}
        self._followers = self._follows(roster)
        self.is_ready = not self._followers
        return self._followers


def follows(
    roster: Roster, solution: Solution, kind: Callable[[Worker], str], heirs: Heirs | None = None
) -> dict[Worker, tuple[Worker, ...]]:
    """Return by member who is to follow it before a plan is carried out.

    These are the members that are to hold layers of another pool, or to keep a copy of such layers.

    They are spread over the members of that pool that compute on a device of the same kind: only there updates have the
    same bits. Where there is none, they load while steps pause.

    Args:
        roster: of the epoch.
        solution: the plan.
        kind: tells that of a member's device.
        heirs: the copies that members will keep.
    """
    found: dict[Worker, tuple[Worker, ...]] = {}
    wanted = list(zip(shards_of(solution.plan), pools_of(solution.plan), strict=True))
    wanted += [
        (shard, (heir,))
        for heir, shards in (heirs or {}).items()
        for shard in shards
        if not _keeps(roster, heir, shard)
    ]
    for held, pool in zip(roster.shards, roster.pools, strict=True):
        comers = dict.fromkeys(
            worker
            for shard, workers in wanted
            if overlap(held, shard)
            for worker in workers
            if worker not in pool
        )
        for comer in comers:
            alike = [owner for owner in pool if kind(owner) == kind(comer)]
            if alike:
                owner = min(alike, key=lambda one: len(found.get(one, ())))
                found[owner] = (*found.get(owner, ()), comer)
    return found


def _keeps(roster: Roster, worker: Worker, shard: tuple[int, int]) -> bool:
    """Whether a member keeps a copy of this shard as a buddy."""
    owners = (owner for owner, buddy in roster.buddies.items() if buddy == worker)
    return any(roster.shard_of(owner) == shard for owner in owners)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> range:
    """Return the layers that two shards [start, stop) have in common."""
    return range(max(one[0], other[0]), min(one[1], other[1]))
