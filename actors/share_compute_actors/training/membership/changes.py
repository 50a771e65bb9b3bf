"""Collects changes for the next pause of a job: machines that leave, a better plan, new microbatch shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from share_compute.backoff import backoff_s
from share_compute.lifecycle.attempt_events import AttemptEvent, Reformed, ReplanAbandoned, ReplanProposed
from share_compute.planning.planner import Solution
from share_compute.protocol.membership import Membership, Worker
from share_compute.quantities import listed
from share_compute.topology import Contributor, Topology
from share_compute_actors.group.backoff import Backoff
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.training.membership.backups import backups_of
from share_compute_actors.training.membership.epochs import Shares, shards_of, stages_of
from share_compute_actors.training.membership.joining import Joining
from share_compute_actors.training.membership.protection import ProtectionWatch
from share_compute_actors.training.membership.training_group import TrainingGroup

_PAUSE_S = 5.0
"""First backoff in seconds, for a machine on which a member was lost, and for lost backup copies."""
_SOON_S = 30.0
"""Time after joining, in seconds, within which the loss of a member doubles the backoff of its machine."""
_LONGEST_PAUSE_S = 600.0
_LASTING = 4
"""Multiple of the last backoff. If new copies last at least this long, their loss resets the backoff to `_PAUSE_S`."""


class Recopying:
    """Backoff before lost backup copies are made again. The backoff doubles if the new copies are soon lost, too.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cramped: set[Worker] = set()
        self._begun_s = clock()
        self._doublings = 0
        self._due_s: float | None = None

    def lost(self, worker: Worker, *, lacks_space: bool, is_restarted: bool = False) -> None:
        """Record that a member lost a backup copy, and begin the backoff if it has not begun yet.

        Args:
            worker: the member.
            lacks_space: whether the member lacks the space for a copy.
            is_restarted: whether the member has begun another copy since the loss. If so, no backoff begins.
        """
        if lacks_space:
            self._cramped.add(worker)
        if self._due_s is not None or is_restarted:
            return
        now = self._clock()
        last_s = backoff_s(_PAUSE_S, self._doublings, _LONGEST_PAUSE_S)
        has_lasted = now - self._begun_s >= _LASTING * last_s
        self._doublings = 0 if has_lasted else self._doublings + 1
        self._due_s = now + backoff_s(_PAUSE_S, self._doublings, _LONGEST_PAUSE_S)

    @property
    def is_due(self) -> bool:
        """Whether lost copies can be made again now, because their backoff is over."""
        return self._due_s is not None and self._clock() >= self._due_s

    def begun(self) -> None:
        """End the backoff, because the next epoch makes the lost copies again; do nothing if no copies were lost."""
        if self._due_s is not None:
            self._begun_s, self._due_s = self._clock(), None

    def backups(
        self,
        stages: Sequence[Sequence[Worker]],
        topology: Topology,
        present: Mapping[Worker, Worker] | None = None,
        *,
        shares_optimizer: bool = False,
    ) -> dict[Worker, Worker]:
        """Return the backup member of each member that alone holds some state; see `backups_of`."""
        return backups_of(stages, topology, self._cramped, present, shares_optimizer=shares_optimizer)


class Changes:
    """Collects changes to a job's members and plan, and decides when a pause for them is due.

    Args:
        group: the members.
        requests: control requests of the control plane.
        report: receives events.
        can_shadow: whether catch-up replicas can copy the shards of members that train.
        quarantined: machines that the job must not use, because of their offences.
    """

    def __init__(
        self,
        group: TrainingGroup,
        requests: ControlRequests,
        report: Callable[[AttemptEvent], None],
        *,
        can_shadow: bool = True,
        quarantined: Collection[Worker] = (),
    ) -> None:
        self._group = group
        self.requests = requests
        """Control requests of the control plane."""
        self._report = report
        self._can_shadow = can_shadow
        self._lock = threading.Lock()
        """Guards the pending plan; also held while plans are reported, so that the reports arrive in order."""
        self._joining: Joining | None = None
        self._given_up = ""
        """Reason why the last proposed plan was given up, until it is reported; otherwise empty."""
        self._was_given_up = False
        """Whether `ReplanAbandoned` was reported since the last call of `take_given_up`."""
        self._shares: Shares | None = None
        self._quarantined: set[Worker] = set(quarantined)
        self._suspected: set[Worker] = set()
        """Members that computed non-finite numbers, until it is known whether the model is the cause.

        They get no stage, but `end_others` does not remove them."""
        self.backoff = Backoff(_PAUSE_S, _LONGEST_PAUSE_S, _SOON_S)
        self._memory_limits: dict[Worker, int] = {}
        """Usable memory in bytes, by machine; only for machines that have less memory than they lend."""
        self.recopying = Recopying()
        self.protection = ProtectionWatch(group, report)
        self.parting: frozenset[Worker] = frozenset()
        """Living members that the next epoch must leave out."""
        self.why = ""
        """Reason for the next epoch, for the user; empty if there is none."""
        self.is_broken = False
        """Whether a member reported a lost tensor or a failed reduction since the last epoch began."""

    def propose(self, solution: Solution, proposed: ReplanProposed) -> None:
        """Report a better plan, and make it the pending plan. Thread-safe."""
        with self._lock:
            self._report(proposed)
            self._given_up = ""
            if self._joining is None or not self._joining.takes(solution, proposed):
                self._joining = Joining(
                    self._group, solution, proposed, self.heirs, can_shadow=self._can_shadow
                )

    def under_way(self) -> Solution | None:
        """Return the plan that was proposed but is not carried out yet; None if there is none. Thread-safe."""
        joining = self._live_joining
        return None if joining is None else joining.solution

    @property
    def _live_joining(self) -> Joining | None:
        """The pending plan; None if there is none.

        Reading this property gives up the plan if the attempt must stop using one of the plan's machines.
        """
        with self._lock:
            joining, leaving = self._joining, self.requests.leaving
            if joining is not None and not joining.machines.isdisjoint(leaving):
                self._joining, self._given_up = None, f"the job must do without {joining.names(leaving)}"
            return self._joining

    def lost(self, worker: Worker) -> None:
        """Begin the backoff of a lost member's machine, and give up the pending plan if it needs the machine."""
        self.backoff.lost(worker)
        joining = self._live_joining
        if joining is not None and worker in joining.machines:
            self._drop(joining, f"{joining.names([worker])} was lost")

    def share(self, shares: Shares) -> None:
        """Request a pause that changes the microbatch shares of some stages to ``shares``."""
        self._shares = shares

    @property
    def leaving(self) -> frozenset[Worker]:
        """Members on machines that the attempt must stop using."""
        return self.requests.leaving & self._group.workers

    @property
    def known(self) -> Topology:
        """All machines that were ever offered to the attempt, including machines that the attempt must stop using."""
        return self._group.topology

    @property
    def usable(self) -> Topology:
        """The machines of the job's members, and the offered machines on which a member may be started.

        Machines that the attempt must stop using are left out.
        """
        group, leaving, offer = self._group, self.requests.leaving, self.requests.offered
        offered = group.topology if offer is None else offer.topology
        known = {machine.id for machine in offered.contributors}
        held = (machine for machine in group.topology.contributors if machine.id not in known)
        machines = (
            self._as_it_is(machine)
            for machine in (*offered.contributors, *held)
            if machine.id not in leaving
            and (machine.id in group.workers or (machine.id in known and self._may_come(machine)))
        )
        return Topology(tuple(machines), offered.links)

    @property
    def cut_off(self) -> tuple[tuple[Worker, Worker], ...]:
        """The pairs of known machines that have a dead link in the latest offer, each pair once."""
        return Topology(self.known.contributors, self.usable.links).cut_off

    def _may_come(self, machine: Contributor) -> bool:
        is_welcome = machine.id not in self._quarantined and machine.id not in self.backoff
        return is_welcome and not self._group.has_refused(machine)

    def suspect(self, worker: Worker) -> None:
        """Begin the backoff of a machine that may have computed wrong numbers, but keep its member for now.

        Other members may load the member's shard until `blame` removes the member.
        """
        self.backoff.lost(worker)
        self._suspected.add(worker)

    def blame(self, worker: Worker) -> None:
        """Remove the member of a machine that computed wrong numbers, if this member was kept as a suspect."""
        if worker in self._suspected:
            self._suspected.discard(worker)
            self._group.remove([worker])

    def quarantine(self, worker: Worker) -> None:
        """Exclude a machine, so that no member is started there again."""
        self._quarantined.add(worker)

    def shrink(self, worker: Worker, taken_bytes: int) -> None:
        """Limit the memory that the job may use on a machine, because a member ran out of memory there.

        Args:
            worker: id of the machine.
            taken_bytes: memory of the member when it ran out of memory, in bytes.
        """
        self._memory_limits[worker] = min(taken_bytes, self._memory_limits.get(worker, taken_bytes))

    def _as_it_is(self, machine: Contributor) -> Contributor:
        limit_bytes = self._memory_limits.get(machine.id)
        if limit_bytes is None or machine.memory_bytes <= limit_bytes:
            return machine
        return machine.with_memory(limit_bytes)

    def are_due(self, membership: Membership) -> bool:
        """Return whether training must pause for changes; also advance the preparation of the pending plan.

        Args:
            membership: membership of the current epoch.
        """
        joining = self._live_joining
        if self.leaving or self._shares is not None or self.recopying.is_due:
            return True
        if joining is None:
            return self._release_abandoned(membership)
        usable, offer = self.usable, self.requests.offered
        lacking = joining.lacking(usable)
        if not lacking:
            return joining.needs_epoch(usable, membership, None if offer is None else offer.answers)
        # Some of the plan's machines left, did not join, or now belong to another job.
        self._drop(joining, f"the job cannot have {joining.names(lacking)}")
        return self._release_abandoned(membership)

    def _drop(self, joining: Joining, why: str = "") -> None:
        with self._lock:
            if self._joining is joining:
                self._joining, self._given_up = None, why

    def _release_abandoned(self, membership: Membership) -> bool:
        """Release the machines of a plan that was given up, and report `ReplanAbandoned`.

        If the current epoch has catch-up replicas, do nothing and return True: a new epoch without them is needed
        first. Otherwise return False.
        """
        if not self._given_up:
            return False
        if membership.followers:
            return True
        self.end_others(membership)
        with self._lock:
            if self._given_up:
                self._report(ReplanAbandoned(reason=self._given_up))
                self._given_up = ""
                self._was_given_up = True
        return False

    def take_given_up(self) -> bool:
        """Return whether `ReplanAbandoned` was reported since the last call of this method."""
        was_given_up, self._was_given_up = self._was_given_up, False
        return was_given_up

    def end_others(self, membership: Membership) -> None:
        """Remove all members that neither the epoch nor the pending plan needs, except suspected members.

        Also kill invited members that the pending plan does not need.
        """
        self._group.remove(self._group.workers - set(membership.everybody) - self.expected - self._suspected)
        self._group.withdraw(self.expected)

    def report_reformed(self, event: Reformed, membership: Membership) -> None:
        """Report an epoch and the machines that are expected to join; then watch the epoch's backup copies.

        Args:
            event: the event, without the expected machines.
            membership: membership of the epoch.
        """
        with self._lock:
            expected = frozenset(membership.everybody) - frozenset(membership.workers)
            # the event includes the reason, so no `ReplanAbandoned` follows
            if self._given_up and not expected:
                self._given_up, self._was_given_up = "", True
            if self._joining is not None:
                expected |= self._joining.machines - set(membership.workers)
            self._report(event.model_copy(update={"expected": tuple(sorted(expected))}))
        self.protection.reform(membership)

    @property
    def expected(self) -> frozenset[Worker]:
        """Machines of the pending plan; empty if there is none."""
        joining = self._live_joining
        return frozenset() if joining is None else joining.machines

    def take_solution(self, able: Collection[Worker]) -> Solution | None:
        """Return and clear the pending plan, if it is ready and all its machines are in `able`; otherwise None."""
        joining = self._live_joining
        # If a member joined too late to be in `able`, a later epoch carries out the plan.
        if joining is None or not joining.is_ready or not joining.machines <= set(able):
            return None
        self._drop(joining)
        self.why = joining.why
        return joining.solution

    def backups(self, membership: Membership, before: Membership | None) -> dict[Worker, Worker]:
        """Choose the backup members for a new epoch; return them by primary.

        Also end the backoff of lost copies, because the epoch makes these copies again.

        Args:
            membership: membership of the new epoch.
            before: membership of the previous epoch; None if there is none.
        """
        if self.recopying.is_due and not self.why:
            self.why = "backups of state that only one machine holds were lost: they are copied again"
        self.recopying.begun()
        shares_optimizer = membership.shares_optimizer
        return self._backups(membership.shards, membership.stages, before, shares_optimizer=shares_optimizer)

    def heirs(self, solution: Solution, before: Membership) -> dict[Worker, tuple[tuple[int, int], ...]]:
        """Return the shards that each member will back up under a plan, by member; empty if `can_shadow` is False.

        Args:
            solution: the plan.
            before: membership of the current epoch.
        """
        if not self._can_shadow:
            return {}
        shards, stages = shards_of(solution.plan), stages_of(solution.plan)
        found: dict[Worker, tuple[tuple[int, int], ...]] = {}
        for primary, backup in self._backups(shards, stages, before).items():
            shard = next(each for each, stage in zip(shards, stages, strict=True) if primary in stage)
            found[backup] = (*found.get(backup, ()), shard)
        return found

    def _backups(
        self,
        shards: Sequence[tuple[int, int]],
        stages: Sequence[Sequence[Worker]],
        before: Membership | None,
        *,
        shares_optimizer: bool = False,
    ) -> dict[Worker, Worker]:
        held = {worker: shard for shard, stage in zip(shards, stages, strict=True) for worker in stage}
        present = {
            primary: backup
            for primary, backup in (before.backups.items() if before is not None else ())
            if before is not None and before.shard_of(primary) == held.get(primary)
        }
        return self.recopying.backups(stages, self.known, present, shares_optimizer=shares_optimizer)

    def replicas(self, membership: Membership) -> dict[Worker, tuple[Worker, ...]]:
        """Choose the catch-up replicas for a new epoch; return them by the member that they shadow.

        Also record the epoch's members as joined, for the backoff of their machines.
        """
        self.backoff.joined(membership.workers)
        joining = self._live_joining
        replicas = {} if joining is None else joining.replicas(membership)
        if self._given_up and not self.why:
            self.why = f"the better plan is given up: {self._given_up}"
        if replicas and not self.why:
            comers = {replica for each in replicas.values() for replica in each}
            new = comers - set(membership.workers)
            names = listed(sorted(map(self._group.name, new or comers)))
            what = f"to join: {names}" if new else f"to hold other layers: {names}"
            self.why = f"{what}; training continues while they fetch their layers"
        return replicas

    def take_shares(self) -> Shares | None:
        """Return and clear the requested shares of microbatches; None if none were requested."""
        shares, self._shares = self._shares, None
        if shares is not None:
            self.why = "slower machines get fewer microbatches, by their measured speeds"
        return shares
