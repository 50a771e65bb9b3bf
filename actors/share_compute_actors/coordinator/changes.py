"""What the next pause of a job changes: machines that leave, a better plan, who computes how much."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from share_compute.jobs.events import AttemptEvent, Reformed, ReplanAbandoned, ReplanProposed
from share_compute.planning.planner import Solution
from share_compute.planning.words import listed
from share_compute.protocol.roster import Roster, Worker
from share_compute.topology import Contributor, Topology
from share_compute_actors.coordinator.buddies import buddies_of
from share_compute_actors.coordinator.coordinator import Wishes
from share_compute_actors.coordinator.crew import Crew
from share_compute_actors.coordinator.joining import Joining
from share_compute_actors.coordinator.protection import ProtectionWatch
from share_compute_actors.coordinator.rosters import Shares, pools_of, shards_of

_REST_S = 5.0
"""After a member was lost, its machine is left alone for so long."""
_SOON_S = 30.0
"""Who is lost that soon after it joined is left alone for twice as long as the last time."""
_LONGEST_REST_S = 600.0
_LASTING = 4
"""A copy that was kept for so many rests is not one that never lasts."""


def _next_rest_s(last_s: float, *, has_lasted: bool) -> float:
    """Return for how long to wait now: ever longer when what was begun after the last rest did not last."""
    return _REST_S if has_lasted else min(2 * last_s, _LONGEST_REST_S)


class Rests:
    """Says which machines are left alone for a while, since members on them were lost.

    Args:
        clock: tells seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Worker, float] = {}
        """When each member joined."""
        self._rests: dict[Worker, tuple[float, float]] = {}
        """How long each machine rests, and until when."""

    def joined(self, workers: Iterable[Worker]) -> None:
        """Take note of who is a member now."""
        now = self._clock()
        for worker in workers:
            self._since.setdefault(worker, now)

    def lost(self, worker: Worker) -> None:
        """Leave a machine alone for a while; for longer each time, up to ten minutes, when its members die soon."""
        now = self._clock()
        is_soon = now - self._since.pop(worker, now) < _SOON_S
        last, _ = self._rests.get(worker, (_REST_S / 2, 0.0))
        rest = _next_rest_s(last, has_lasted=not is_soon)
        self._rests[worker] = rest, now + rest

    def __contains__(self, worker: Worker) -> bool:
        """Return whether a machine is left alone now."""
        return worker in self._rests and self._clock() < self._rests[worker][1]


class Recopying:
    """Says when copies that were lost are begun anew: soon at first, later each time they do not last.

    Args:
        clock: tells seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cramped: set[Worker] = set()
        self._begun_s = clock()
        self._rest_s = _REST_S
        self._due_s: float | None = None

    def lost(self, worker: Worker, *, lacks_room: bool, is_begun_anew: bool = False) -> None:
        """Take note of a member that cannot keep its copy.

        Args:
            worker: the member.
            lacks_room: whether it has no room for one.
            is_begun_anew: whether another copy was begun since.
        """
        if lacks_room:
            self._cramped.add(worker)
        if self._due_s is not None or is_begun_anew:
            return
        now = self._clock()
        has_lasted = now - self._begun_s >= _LASTING * self._rest_s
        self._rest_s = _next_rest_s(self._rest_s, has_lasted=has_lasted)
        self._due_s = now + self._rest_s

    @property
    def is_due(self) -> bool:
        """Whether it is time to begin them anew."""
        return self._due_s is not None and self._clock() >= self._due_s

    def begun(self) -> None:
        """Take note that what was lost is begun anew in an epoch that is being formed."""
        if self._due_s is not None:
            self._begun_s, self._due_s = self._clock(), None

    def buddies(
        self,
        pools: Sequence[Sequence[Worker]],
        topology: Topology,
        present: Mapping[Worker, Worker] | None = None,
    ) -> dict[Worker, Worker]:
        """Return who keeps copies for pools of one; see `buddies_of`."""
        return buddies_of(pools, topology, self._cramped, present)


class Changes:
    """Collects what is to change, and says when it is time to.

    Args:
        crew: the members.
        wishes: what the control plane asks.
        tell: takes what happens.
        given_up: is called when a plan that was told of is given up.
        can_follow: whether members can be followed while they train.
        quarantined: machines that made wrong numbers, which the job does without.
    """

    def __init__(
        self,
        crew: Crew,
        wishes: Wishes,
        tell: Callable[[AttemptEvent], None],
        given_up: Callable[[], None] = lambda: None,
        *,
        can_follow: bool = True,
        quarantined: Collection[Worker] = (),
    ) -> None:
        self._crew = crew
        self._wishes = wishes
        self._tell = tell
        self._tell_given_up = given_up
        self._can_follow = can_follow
        self._lock = threading.Lock()
        """Also held while plans are told of: so the control plane hears of them in the order in which they count."""
        self._joining: Joining | None = None
        self._given_up = ""
        """Why a plan that was told of is not carried out, until its machines are let go and that is told, too."""
        self._shares: Shares | None = None
        self._quarantined: set[Worker] = set(quarantined)
        self._suspected: set[Worker] = set()
        """Members that are in no pool, since it is not clear yet whether their numbers are wrong."""
        self.rests = Rests()
        self._room: dict[Worker, int] = {}
        """Memory, in bytes, of machines that had less than they lend."""
        self.recopying = Recopying()
        self.protection = ProtectionWatch(crew, tell)
        self.parting: frozenset[Worker] = frozenset()
        """Members that the next epoch does without, though they are there."""
        self.why = ""
        """Reason for the epoch that begins, for people."""
        self.is_broken = False
        """Whether a member lacked something in the epoch that is over, or its pool's sum came to nothing."""

    def propose(self, solution: Solution, proposed: ReplanProposed) -> None:
        """Tell of a better plan, and carry it out once its machines are there; from any thread. The newest counts."""
        with self._lock:
            self._tell(proposed)
            self._given_up = ""
            if self._joining is None or not self._joining.takes(solution, proposed):
                self._joining = Joining(
                    self._crew, solution, proposed, self.heirs, can_follow=self._can_follow
                )

    def under_way(self) -> Solution | None:
        """Return the plan that waits for its machines, if one does; from any thread."""
        joining = self._live_joining
        return None if joining is None else joining.solution

    @property
    def _live_joining(self) -> Joining | None:
        """The plan that was asked for, unless one of its machines is to leave."""
        with self._lock:
            joining, leaving = self._joining, self._wishes.leaving
            if joining is not None and not joining.machines.isdisjoint(leaving):
                self._joining, self._given_up = None, f"the job must do without {joining.names(leaving)}"
            return self._joining

    def lost(self, worker: Worker) -> None:
        """Leave a machine alone for a while, and give up a plan that needs it."""
        self.rests.lost(worker)
        joining = self._live_joining
        if joining is not None and worker in joining.machines:
            self._drop(joining, f"{joining.names([worker])} was lost")

    def share(self, shares: Shares) -> None:
        """Ask for other shares of microbatches in some pools at the next pause."""
        self._shares = shares

    @property
    def leaving(self) -> frozenset[Worker]:
        """Members that are asked to leave."""
        return self._wishes.leaving & self._crew.workers

    @property
    def known(self) -> Topology:
        """All machines that members run on or ran on."""
        return self._crew.topology

    @property
    def usable(self) -> Topology:
        """All machines that the job may use from now on: those that it holds, and those that it was offered."""
        crew, leaving, offer = self._crew, self._wishes.leaving, self._wishes.offered
        offered = crew.topology if offer is None else offer.topology
        known = {machine.id for machine in offered.contributors}
        held = (machine for machine in crew.topology.contributors if machine.id not in known)
        machines = (
            self._as_it_is(machine)
            for machine in (*offered.contributors, *held)
            if machine.id not in leaving
            and (machine.id in crew.workers or (machine.id in known and self._may_come(machine)))
        )
        return Topology(tuple(machines), offered.links)

    def _may_come(self, machine: Contributor) -> bool:
        is_welcome = machine.id not in self._quarantined and machine.id not in self.rests
        return is_welcome and not self._crew.has_refused(machine)

    def suspect(self, worker: Worker) -> None:
        """Leave a machine alone for a while. Its member is kept until it is blamed: others may read from it."""
        self.rests.lost(worker)
        self._suspected.add(worker)

    def blame(self, worker: Worker) -> None:
        """End the member of a machine that made wrong numbers, if it was kept."""
        if worker in self._suspected:
            self._suspected.discard(worker)
            self._crew.remove([worker])

    def quarantine(self, worker: Worker) -> None:
        """Do without a machine from now on."""
        self._quarantined.add(worker)

    def shrink(self, worker: Worker, room_bytes: int) -> None:
        """Count on no more memory than this of a machine from now on."""
        self._room[worker] = min(room_bytes, self._room.get(worker, room_bytes))

    def _as_it_is(self, machine: Contributor) -> Contributor:
        room = self._room.get(machine.id)
        if room is None or machine.memory_bytes <= room:
            return machine
        devices = (
            replace(device, memory_bytes=room) if device == machine.device else device
            for device in machine.devices
        )
        return replace(machine, devices=tuple(devices))

    def are_due(self, roster: Roster) -> bool:
        """Whether there is something to pause for; brings forward what takes time before that.

        Args:
            roster: of the epoch.
        """
        joining = self._live_joining
        if self.leaving or self._shares is not None or self.recopying.is_due:
            return True
        if joining is None:
            return self._let_go(roster)
        usable, offer = self.usable, self._wishes.offered
        lacking = joining.lacking(usable)
        if not lacking:
            return joining.needs_epoch(usable, roster, None if offer is None else offer.answers)
        # Machines left again, did not come, or are another job's.
        self._drop(joining, f"the job cannot have {joining.names(lacking)}")
        return self._let_go(roster)

    def _drop(self, joining: Joining, why: str = "") -> None:
        with self._lock:
            if self._joining is joining:
                self._joining, self._given_up = None, why

    def _let_go(self, roster: Roster) -> bool:
        """Let go of the machines of a plan that was given up; return whether that takes an epoch."""
        if not self._given_up:
            return False
        if roster.followers:
            return True
        self.end_others(roster)
        with self._lock:
            if self._given_up:
                self._tell(ReplanAbandoned(reason=self._given_up))
                self._given_up = ""
                self._tell_given_up()
        return False

    def end_others(self, roster: Roster) -> None:
        """End members that are of no use to an epoch: they left, or had come for a plan that is not wanted any more."""
        self._crew.remove(self._crew.workers - set(roster.everybody) - self.expected - self._suspected)
        self._crew.withdraw(self.expected)

    def tell_reformed(self, event: Reformed, roster: Roster) -> None:
        """Tell of an epoch, and of who is on the way into the job.

        Args:
            event: what happened.
            roster: of the epoch.
        """
        with self._lock:
            expected = frozenset(roster.everybody) - frozenset(roster.workers)
            if not expected:
                self._given_up = ""
            if self._joining is not None:
                expected |= self._joining.machines - set(roster.workers)
            self._tell(event.model_copy(update={"expected": tuple(sorted(expected))}))
        self.protection.reform(roster)

    @property
    def expected(self) -> frozenset[Worker]:
        """Machines of a plan that is on its way."""
        joining = self._live_joining
        return frozenset() if joining is None else joining.machines

    def take_solution(self, able: Collection[Worker]) -> Solution | None:
        """Return the plan that was asked for, once, when all its machines are able to carry it out."""
        joining = self._live_joining
        # Where an epoch begins for another reason, those that are to join are not asked: the next one carries it out.
        if joining is None or not joining.is_ready or not joining.machines <= set(able):
            return None
        self._drop(joining)
        self.why = joining.why
        return joining.solution

    def buddies(self, roster: Roster, before: Roster | None) -> dict[Worker, Worker]:
        """Return who keeps copies of whose shards in an epoch that is being formed.

        Args:
            roster: of that epoch.
            before: of the epoch before.
        """
        if self.recopying.is_due and not self.why:
            self.why = "copies of what one machine alone holds were lost: they are begun anew"
        self.recopying.begun()
        return self._buddies(roster.shards, roster.pools, before)

    def heirs(self, solution: Solution, before: Roster) -> dict[Worker, tuple[tuple[int, int], ...]]:
        """Return the shards of which each member will keep a copy once a plan is carried out.

        Args:
            solution: the plan.
            before: roster of the epoch before that.
        """
        if not self._can_follow:
            return {}
        shards, pools = shards_of(solution.plan), pools_of(solution.plan)
        found: dict[Worker, tuple[tuple[int, int], ...]] = {}
        for owner, buddy in self._buddies(shards, pools, before).items():
            shard = next(each for each, pool in zip(shards, pools, strict=True) if owner in pool)
            found[buddy] = (*found.get(buddy, ()), shard)
        return found

    def _buddies(
        self,
        shards: Sequence[tuple[int, int]],
        pools: Sequence[Sequence[Worker]],
        before: Roster | None,
    ) -> dict[Worker, Worker]:
        held = {worker: shard for shard, pool in zip(shards, pools, strict=True) for worker in pool}
        present = {
            owner: buddy
            for owner, buddy in (before.buddies.items() if before is not None else ())
            if before is not None and before.shard_of(owner) == held.get(owner)
        }
        return self.recopying.buddies(pools, self.known, present)

    def followers(self, roster: Roster) -> dict[Worker, tuple[Worker, ...]]:
        """Return by member who is to hold some of its layers, and follows it in an epoch that is being formed."""
        self.rests.joined(roster.workers)
        joining = self._live_joining
        followers = {} if joining is None else joining.followers(roster)
        if self._given_up and not self.why:
            self.why = f"the better plan is given up: {self._given_up}"
        if followers and not self.why:
            comers = {follower for each in followers.values() for follower in each}
            new = comers - set(roster.workers)
            names = listed(sorted(map(self._crew.name, new or comers)))
            what = f"to join: {names}" if new else f"to hold other layers: {names}"
            self.why = f"{what}, as soon as what they are to hold has come"
        return followers

    def take_shares(self) -> Shares | None:
        """Return the shares that were asked for, once."""
        shares, self._shares = self._shares, None
        if shares is not None:
            self.why = "microbatches are shared as fast as machines show themselves to be"
        return shares
