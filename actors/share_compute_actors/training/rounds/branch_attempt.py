"""One branch of a job, seen from the synchronizer: its machines, its coordinator, and its reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from share_compute.errors import ContributorLost
from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEnded,
    AttemptEvent,
    BranchRound,
    Offer,
    attempt_events,
)
from share_compute.planning.branches import BranchPlace, island_topology
from share_compute.planning.plan import BranchPlan, Plan
from share_compute.synchronization.aggregator import payload_bytes
from share_compute.topology import Topology
from share_compute_actors.training.rounds.messages import BranchReport, BranchUpdates

_POLL_S = 0.1
_END_S = 30.0
"""Time in which the coordinators of branches end after a request, in seconds; then they are killed."""
_EVENTS_S = 1.0
"""Longest wait of a coordinator's answer for its next event, in seconds."""


class BranchAttempt:
    """A branch and the coordinator that trains it.

    Args:
        number: number of the branch.
        place: machines that train the branch.
        start: starts the coordinator of a branch on this node, and returns its actor.
    """

    def __init__(self, number: int, place: BranchPlace, start: Callable[[Assignment], Any]) -> None:
        self.number = number
        self.place = place
        self._start = start
        self._actor: Any = None
        self._received = 0
        self._call: Any = None
        self.plan: Plan | None = None
        """Plan that the branch carries out; None before its coordinator has planned."""
        self.base = 0
        """Version of the weights with which the branch computes its round, as far as the synchronizer knows."""
        self.sent = 0
        """Version of the last update that was sent to the branch."""
        self.oldest = 0
        """Version after which updates are kept for the branch.

        Before its first report, it may have older weights than `base`, if its members were taken over."""
        self.starts = 0
        """Number of times that a coordinator was started for the branch."""
        self.begins_later: Callable[[], object] | None = None
        """Function that begins the branch when others have pushed their changes; None if it does not wait for them."""
        self.has_begun = False
        """Whether members have loaded the weights of version `base`, or of a later one."""
        self.waiting: BranchReport | None = None
        """Report for which the branch waits for updates; None if it waits for none."""
        self.moves_to: BranchPlace | None = None
        """Machines on which the branch begins again when its coordinator has saved its state; None if it stays."""
        self.restarts = 0
        """Number of restarts since the last contribution."""
        self.has_ended = True
        """Whether no coordinator trains the branch."""

    def begin(self, assignment: Assignment) -> None:
        """Start a coordinator for the branch."""
        assert assignment.branch is not None
        self.base, self.waiting, self.has_begun = assignment.branch.version, None, False
        self.starts, self.oldest = assignment.branch.start, 0
        self.moves_to, self.begins_later = None, None
        self._actor, self._received, self.has_ended = self._start(assignment), 0, False
        self._actor.run.remote()
        self._ask()

    def _ask(self) -> None:
        self._call = self._actor.events.remote(self._received, _EVENTS_S)

    @property
    def call(self) -> Any:
        """Pending call for the next events."""
        return self._call

    def take_events(self) -> Sequence[AttemptEvent]:
        """Return the events that the pending call brought, and call for the next ones.

        Raises:
            RayError: the coordinator died.
        """
        events = attempt_events.validate_json(ray.get(self._call))
        self._received += len(events)
        self._ask()
        return events

    def update(self, updates: BranchUpdates) -> None:
        """Send updates to the branch."""
        self.waiting = None
        self.sent = max((update.version for update in updates.updates), default=self.sent)
        self._actor.take_updates.remote(updates.model_dump_json())

    def request_again(self, report: BranchReport) -> None:
        """Ask the branch to resend the contribution of a report."""
        self.update(BranchUpdates(base=report.round - 1, updates=(), is_over=False, repeats=True))

    def offer(self, topology: Topology, answers: int | None = None) -> None:
        """Send the coordinator the machines of the branch that are present.

        Args:
            topology: the machines of the job.
            answers: step of the proposed plan that this offer answers; None if there is none.
        """
        known = {machine.id for machine in topology.contributors}
        machines = tuple(machine for machine in self.place.machines if machine in known)
        if machines and not self.has_ended:
            place = BranchPlace(machines, self.place.branches, self.place.step_s)
            offer = Offer(topology=island_topology(topology, place), answers=answers)
            self._actor.offer.remote(offer.model_dump_json())

    def request(self, method: str, *arguments: Any) -> None:
        """Call a method for control requests of the coordinator, such as ``cancel``; do not wait for its answer."""
        if not self.has_ended:
            getattr(self._actor, method).remote(*arguments)

    def kill(self) -> None:
        """End the coordinator; the members may keep running."""
        self.has_ended = True
        if self._actor is not None:
            with suppress(RayError):  # it may be dead
                ray.kill(self._actor)

    def figures(self, report: BranchReport, waited_s: float) -> BranchRound:
        """Return the figures of a round whose contribution is merged.

        Args:
            report: report of the branch.
            waited_s: time from the report to the merge, in seconds; 0 if the branch continues to train meanwhile.
        """
        return BranchRound(
            number=report.branch,
            round=report.round,
            machines=self.place.machines,
            loss=report.loss,
            samples=report.samples,
            seconds=report.seconds,
            waited_s=waited_s,
            sent_bytes=_sent_bytes(report),
        )

    @property
    def branch_plan(self) -> BranchPlan:
        """The branch's part of the job's plan. The branch must have a plan."""
        assert self.plan is not None
        prediction = self.plan.prediction
        return BranchPlan(
            number=self.number,
            stages=self.plan.stages,
            step_s=None if prediction is None else prediction.step_s,
        )


def _sent_bytes(report: BranchReport) -> int:
    if report.folder is not None:
        return payload_bytes(report.folder)
    return sum(part.size_bytes for part in report.parts)


def places_of(branches: Sequence[BranchAttempt]) -> list[BranchPlace]:
    """Return the islands with branches, with the numbers of the branches on each."""
    found: dict[tuple[str, ...], list[BranchAttempt]] = {}
    for branch in branches:
        found.setdefault(branch.place.machines, []).append(branch)
    return [
        BranchPlace(machines, tuple(each.number for each in there), there[0].place.step_s)
        for machines, there in found.items()
    ]


def place_with_members(chosen: BranchPlace, held: Collection[str], topology: Topology) -> BranchPlace:
    """Return the machines with members of an earlier attempt, or ``chosen`` if it contains all of them.

    Args:
        chosen: the best machines for the branch.
        held: machines with members of the branch.
        topology: the machines of the job.
    """
    machines = tuple(machine.id for machine in topology.contributors if machine.id in held)
    return chosen if set(chosen.machines).issuperset(machines) else replace(chosen, machines=machines)


def other_place(
    branch: BranchAttempt,
    branches: Sequence[BranchAttempt],
    left: Collection[str],
    can_hold: Callable[[BranchPlace], bool],
    why: str,
) -> BranchPlace:
    """Return machines for a branch that lost some of its own.

    The first of these that exists is returned:

    1. The rest of the branch's own machines, if they can hold the model. If all of them are in ``left``, the loss is
       not known yet, so they do not count.
    2. The machines of the branch with the fewest neighbours, among the branches that have all of theirs. Branches
       without a coordinator are the second choice: their loss may not be known yet.
    3. The rest of the branch's own machines, or else all that are left.

    Args:
        branch: the branch.
        branches: all branches of the job.
        left: ids of the machines that the job may use.
        can_hold: returns whether an island can hold the model once for each of its branches.
        why: the reason of the loss, for the user.

    Raises:
        ContributorLost: no machine is left.
    """
    if not left:
        raise ContributorLost(why, hint="let a machine join; the job continues by itself")
    others = [other for other in branches if other is not branch]
    staying = [other for other in others if not other.has_ended or other.begins_later is not None]

    def place_on(machines: tuple[str, ...], step_s: float) -> BranchPlace:
        there = [other.number for other in staying if not set(machines).isdisjoint(other.place.machines)]
        return BranchPlace(machines, tuple(sorted([branch.number, *there])), step_s)

    rest = tuple(machine for machine in branch.place.machines if machine in left)
    own = place_on(rest or tuple(sorted(left)), branch.place.step_s)
    if rest and rest != branch.place.machines and can_hold(own):
        return own
    there: dict[tuple[str, ...], list[BranchAttempt]] = {}
    for other in others:
        if set(left).issuperset(other.place.machines):
            there.setdefault(other.place.machines, []).append(other)
    if not there:
        return own
    machines = min(there, key=lambda key: (all(each.has_ended for each in there[key]), len(there[key]), key))
    return place_on(machines, there[machines][0].place.step_s)


def await_ends(branches: Sequence[BranchAttempt]) -> None:
    """Wait until the coordinators of all branches have ended; kill those that do not end in time."""
    deadline_s = time.monotonic() + _END_S
    while time.monotonic() < deadline_s:
        calls = {branch.call: branch for branch in branches if not branch.has_ended}
        if not calls:
            return
        for ref in ray.wait(list(calls), num_returns=len(calls), timeout=_POLL_S)[0]:
            branch = calls[ref]
            try:
                events = branch.take_events()
            except RayError:
                branch.kill()
            else:
                branch.has_ended = any(isinstance(event, AttemptEnded) for event in events)
    for branch in branches:
        branch.kill()
