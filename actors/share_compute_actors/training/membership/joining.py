"""Prepares a better plan while training continues: starts members on added machines, and copies layers in advance.

1. The job reports the plan. The report also requests the machines that the plan adds.
2. The control plane grants these machines, and the job starts members there.
3. If the plan gives a member layers that it does not hold, to train or to back up, the member becomes a catch-up
   replica. In each stage that has some of these layers, it shadows one member. It receives this member's shard
   piece by piece, and the gradients of the steps that are computed meanwhile.
4. When all replicas have caught up, training pauses for the new plan. Little data is left to transfer.

New backup copies start from data that is already on their machines, so they are complete soon after the pause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from share_compute.lifecycle.attempt_events import ReplanProposed
from share_compute.planning.drift import have_same_shards
from share_compute.planning.planner import Solution
from share_compute.protocol.membership import Membership, Worker
from share_compute.quantities import listed
from share_compute.topology import Topology
from share_compute_actors.training.membership.epochs import shards_of, stages_of
from share_compute_actors.training.membership.training_group import Poll, TrainingGroup

Heirs = Mapping[Worker, Sequence[tuple[int, int]]]
"""Shards that each member will back up, by member."""


class Joining:
    """Prepares one plan, from its proposal until members on all its machines are ready for it.

    Args:
        group: the members.
        solution: the plan.
        proposed: the event that reported the plan.
        heirs: returns the shards that members will back up, given a plan and the current membership.
        can_shadow: whether catch-up replicas can copy shards during training. If not, shards are loaded while training
            pauses.
    """

    def __init__(
        self,
        group: TrainingGroup,
        solution: Solution,
        proposed: ReplanProposed,
        heirs: Callable[[Solution, Membership], Heirs] = lambda _solution, _membership: {},
        *,
        can_shadow: bool = True,
    ) -> None:
        self._group = group
        self._heirs = heirs
        self._can_shadow = can_shadow
        self.solution = solution
        self._proposed = proposed
        self._is_linked = False
        """Whether all machines of the plan had a member when the current epoch was formed."""
        self._replicas: dict[Worker, tuple[Worker, ...]] = {}
        self._poll = Poll(group)
        self.is_ready = False
        """Whether the next epoch can carry out the plan."""

    @property
    def machines(self) -> frozenset[Worker]:
        """All machines that hold layers in the plan."""
        return frozenset(worker for stage in stages_of(self.solution.plan) for worker in stage)

    @property
    def why(self) -> str:
        """Reason why the plan is better, for the user."""
        return self._proposed.sentence

    def names(self, workers: Collection[Worker]) -> str:
        """Return the names of the plan's machines that are among `workers`, for the user."""
        members = (member for stage in self.solution.plan.stages for member in stage.members)
        return listed(sorted(member.name for member in members if member.contributor_id in workers))

    def takes(self, solution: Solution, proposed: ReplanProposed) -> bool:
        """Replace the plan if the new plan has the same shards and members; return whether it was replaced."""
        is_like = have_same_shards(self.solution.plan, solution.plan)
        if is_like:
            self.solution, self._proposed = solution, proposed
        return is_like

    def lacking(self, usable: Topology) -> frozenset[Worker]:
        """Return the plan's machines that have no member and are not usable."""
        return self.machines - self._group.workers - {machine.id for machine in usable.contributors}

    def needs_epoch(self, usable: Topology, membership: Membership, granted: int | None) -> bool:
        """Advance the preparation of the plan; return whether the preparation must continue in a new epoch.

        Args:
            usable: machines on which members may be started.
            membership: membership of the current epoch.
            granted: step of the last proposal whose machines were granted to the job; None if there is none. Members
                are started only if it equals the step at which this plan was proposed.
        """
        missing = self.machines - self._group.workers
        if missing and granted != self._proposed.step:
            return False
        if missing:
            shards = {
                member.contributor_id: self.solution.plan.shard(place)
                for place, stage in enumerate(self.solution.plan.stages)
                for member in stage.members
            }
            self._group.invite({worker: shards[worker] for worker in missing}, usable)
            return False
        if not self._is_linked:
            self.is_ready = not self._replicas_of(membership)
        if not self._is_linked or self.is_ready:
            return True
        replicas = {replica for each in self._replicas.values() for replica in each}
        self.is_ready = self._poll.is_unanimous(lambda: self._group.query_caught_up(replicas))
        return self.is_ready

    def _replicas_of(self, membership: Membership) -> dict[Worker, tuple[Worker, ...]]:
        if not self._can_shadow:
            return {}
        topology = self._group.topology
        heirs = self._heirs(self.solution, membership)
        cut_off = frozenset(map(frozenset, topology.cut_off))
        return replicas_of(membership, self.solution, lambda one: topology[one].device.kind, heirs, cut_off)

    def replicas(self, membership: Membership) -> dict[Worker, tuple[Worker, ...]]:
        """Choose the catch-up replicas for a new epoch, and update `is_ready`.

        Return the replicas by the member that they shadow; empty while a machine of the plan has no member.
        """
        self._is_linked, self._poll = self.machines <= self._group.workers, Poll(self._group)
        if not self._is_linked:
            self._replicas, self.is_ready = {}, False
            return {}
        self._replicas = self._replicas_of(membership)
        self.is_ready = not self._replicas
        return self._replicas


def replicas_of(
    membership: Membership,
    solution: Solution,
    kind: Callable[[Worker], str],
    heirs: Heirs | None = None,
    cut_off: Collection[frozenset[Worker]] = (),
) -> dict[Worker, tuple[Worker, ...]]:
    """Return the catch-up replicas that prepare a plan, by the member that they shadow.

    A member becomes a replica of another stage in two cases:

    - The plan gives the member layers of this stage.
    - The plan gives the member a shard to back up that it does not back up yet, and the shard has layers of this stage.

    In each stage, a replica shadows one member that it can reach. The devices of both must be of the same kind.
    Only then are their updates bit-identical. Replicas are spread evenly over the suitable members. If a stage has no
    suitable member, its layers are loaded while training pauses.

    Args:
        membership: membership of the current epoch.
        solution: the plan.
        kind: returns the kind of a member's device.
        heirs: the shards that members will back up.
        cut_off: the pairs of machines that cannot reach each other.
    """
    found: dict[Worker, tuple[Worker, ...]] = {}
    wanted = list(zip(shards_of(solution.plan), stages_of(solution.plan), strict=True))
    wanted += [
        (shard, (heir,))
        for heir, shards in (heirs or {}).items()
        for shard in shards
        if not _is_copy_holder(membership, heir, shard)
    ]
    for held, stage in zip(membership.shards, membership.stages, strict=True):
        comers = dict.fromkeys(
            worker
            for shard, workers in wanted
            if overlap(held, shard)
            for worker in workers
            if worker not in stage
        )
        for comer in comers:
            alike = [owner for owner in stage if kind(owner) == kind(comer) and {owner, comer} not in cut_off]
            if alike:
                owner = min(alike, key=lambda one: len(found.get(one, ())))
                found[owner] = (*found.get(owner, ()), comer)
    return found


def _is_copy_holder(membership: Membership, worker: Worker, shard: tuple[int, int]) -> bool:
    """Return whether a member keeps a backup copy of this shard."""
    primaries = (primary for primary, backup in membership.backups.items() if backup == worker)
    return any(membership.shard_of(primary) == shard for primary in primaries)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> range:
    """Return the layers that two shards [start, stop) have in common."""
    return range(max(one[0], other[0]), min(one[1], other[1]))
