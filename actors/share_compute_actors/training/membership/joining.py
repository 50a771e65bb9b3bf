"""Prepares a better plan: members are started on its machines and brought up to date while other members train.

First the job reports the plan, and thereby asks for the machines that the plan adds. Members are started there once the
control plane answers that the job may have the machines.

Then some members become catch-up replicas: members to which the plan gives layers that they do not hold, or a
backup copy of such layers. A replica shadows one member of each stage that has some of these layers, as a
backup member does. The replica receives this member's shard piece by piece, and the gradients of the steps
that are computed meanwhile.

Training pauses for the new plan only when all replicas have caught up, so little is left to transfer. New
backup copies start from data that is already on their machines, so they are complete soon after the plan is
carried out.
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
"""Shards of which each member will keep a backup copy, by member."""


class Joining:
    """Prepares one plan, from its proposal until members on all its machines are ready for it.

    Args:
        group: the members.
        solution: the plan.
        proposed: the event that reported the plan.
        heirs: returns the backup copies that members will keep, for a plan and the membership before it.
        can_shadow: whether catch-up replicas can copy the shards of members that train; if not, shards are loaded while
            training pauses.
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
        """Whether the last epoch was formed with members on all machines of the plan, so that replicas can catch up."""
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
        """Replace the plan if the new one differs at most in shares of microbatches; return whether it was replaced."""
        is_like = have_same_shards(self.solution.plan, solution.plan)
        if is_like:
            self.solution, self._proposed = solution, proposed
        return is_like

    def lacking(self, usable: Topology) -> frozenset[Worker]:
        """Return the plan's machines that have no member and may not be used."""
        return self.machines - self._group.workers - {machine.id for machine in usable.contributors}

    def needs_epoch(self, usable: Topology, membership: Membership, granted: int | None) -> bool:
        """Advance the preparation of the plan; return whether it needs another epoch to continue.

        Args:
            usable: machines on which members may be started.
            membership: membership of the current epoch.
            granted: step of the last proposal whose machines were granted to the job; None if there is none. No member
                is started before the machines of this plan's proposal are granted.
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
        """Choose the catch-up replicas for an epoch that is being formed, and update `is_ready`.

        Return the replicas by the member that they shadow. There are none if a machine of the plan has no
        member yet.
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
    """Return the catch-up replicas of each member, for the time before a plan is carried out.

    A member becomes a replica if the plan gives it layers of another stage, or a backup copy of such layers
    that it does not keep yet.

    In each stage, a replica shadows a member that it can reach and whose device is of the same kind as its
    own, because only such devices compute updates with the same bits. The replicas are spread over all such
    members. If a stage has no such member, the layers are loaded while training pauses.

    Args:
        membership: membership of the current epoch.
        solution: the plan.
        kind: returns the kind of a member's device.
        heirs: the backup copies that members will keep.
        cut_off: the pairs of machines that do not reach each other.
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
