"""Finds the roster of each epoch, and has members loaded with what they lack for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from share_compute.errors import ContributorLost, PlanInfeasible
from share_compute.planning.drift import plan_again
from share_compute.planning.planner import Solution
from share_compute.planning.timings import Timings
from share_compute.protocol.coordinator import Plan
from share_compute.protocol.messages import Form
from share_compute.protocol.roster import Roster, Worker
from share_compute.specification import TrainJob
from share_compute.topology import Topology
from share_compute_actors.coordinator.changes import Changes
from share_compute_actors.coordinator.moving import Mover
from share_compute_actors.coordinator.rosters import (
    Shares,
    computed_again,
    first_form,
    machines_lost,
    moved_form,
    next_form,
    standing,
)


class Former:
    """Plans the epochs of one attempt.

    Args:
        spec: the job, its number of microbatches settled.
        solution: who holds what at the beginning.
        changes: what is asked for.
        mover: brings shards to members.
        scales: tells what the gradient of each committed step was multiplied by.
        note: takes lines for the job's log.
        timings: tells what was measured of layers so far.
        roster: of the epoch before, when another attempt's members are taken over.
    """

    def __init__(
        self,
        spec: TrainJob,
        solution: Solution,
        changes: Changes,
        mover: Mover,
        scales: Callable[[], Mapping[int, float]],
        note: Callable[[str], None],
        timings: Callable[[], Timings] = dict,
        roster: Roster | None = None,
    ) -> None:
        self._spec = spec
        self.solution = solution
        """What the members carry out."""
        self._changes = changes
        self._mover = mover
        self._scales = scales
        self._note = note
        self._timings = timings
        self._roster = roster
        self._before = roster, solution
        self.recomputed = 0
        """Microbatches that the last epoch computes again, since who had computed them is lost."""

    def form(self, asked: Plan) -> Form:
        """Return the next epoch, for the members that reported; what they lack is brought to them, for `adopt`.

        Raises:
            ContributorLost: nobody has some part of the model any more, or who had it died meanwhile.
            MembersLost: members died meanwhile.
            PlanInfeasible: those that are left cannot hold the model.
        """
        before = self._roster
        self._before = before, self.solution
        self._mover.forget()
        leaving = self._changes.parting | asked.without
        able = frozenset(asked.reports) - leaving
        shares = self._changes.take_shares()
        wanted = self._changes.take_solution(able)
        if before is None:
            plan = self.solution.plan
            form = first_form(plan, asked, is_tied=self._is_tied(len(plan.pools)))
            if not able >= set(form.roster.workers):
                form = self._without(form.roster, asked, able, leaving, None)
        else:
            form = self._improved(before, wanted, asked) or self._without(
                before, asked, able, leaving, shares
            )
        if before is not None:
            self.recomputed = computed_again(before, form.roster, list(asked.reports.values()))
        form = self._with_copies(form, before)
        self._roster = form.roster
        self.solution = standing(form.roster, self.solution)
        return form

    def adopt(self) -> None:
        """Let members work with what was brought to them, once the epoch is written down.

        Raises:
            MembersLost: members died meanwhile; some may have it.
        """
        try:
            self._mover.adopt()
        except BaseException:
            self._roster, self.solution = self._before
            raise

    def _with_copies(self, form: Form, before: Roster | None) -> Form:
        """Settle who keeps copies in an epoch: buddies of those that are alone, and who is to hold other layers."""
        roster = form.roster
        buddies = self._changes.buddies(roster, before) if self._spec.parallelism.buddies else {}
        followers = self._changes.followers(roster)
        return replace(form, roster=replace(roster, buddies=buddies, followers=followers))

    def can_do_without(self, leaving: frozenset[Worker]) -> bool:
        """Whether the others could hold what these hold."""
        assert self._roster is not None
        if all(not leaving.issuperset(pool) for pool in self._roster.pools):
            return True
        try:
            self._plan(frozenset(self._roster.workers) - leaving, self._roster.epoch + 1)
        except PlanInfeasible:
            return False
        return True

    def _without(
        self,
        before: Roster,
        asked: Plan,
        able: frozenset[Worker],
        leaving: frozenset[Worker],
        shares: Shares | None,
    ) -> Form:
        """Go on with those that are able to: with the same shards where each pool has somebody left."""
        is_whole = all(not able.isdisjoint(pool) for pool in before.pools)
        if is_whole and not self._mover.is_torn:
            return next_form(before, asked, self.solution.cost, leaving, shares)
        if not able:
            raise machines_lost(self.solution.cost.topology, before.workers)
        return self._moved(before, self._plan(able, asked.epoch), asked)

    def _improved(self, before: Roster, wanted: Solution | None, asked: Plan) -> Form | None:
        """Go over to a better plan; None when there is none, or when it does not fit after all."""
        if wanted is None:
            return None
        try:
            return self._moved(before, wanted, asked)
        except (PlanInfeasible, ContributorLost) as failure:
            self._changes.why = ""
            self._note(f"stays with its plan, since in the better one {failure.message}")
            return None

    def _moved(self, before: Roster, solution: Solution, asked: Plan) -> Form:
        heirs = self._changes.heirs(solution, before)
        moved = self._mover.load(before, solution.plan, asked, self._scales(), heirs)
        self.solution = solution
        tied = self._is_tied(len(solution.plan.pools))
        return moved_form(before, solution.plan, asked, moved, is_tied=tied)

    def _plan(self, able: frozenset[Worker], epoch: int) -> Solution:
        """Lay the job over these machines; see `plan_again`."""
        usable = self._changes.usable
        machines = Topology(
            tuple(machine for machine in usable.contributors if machine.id in able), usable.links
        )
        return plan_again(
            self._spec,
            machines,
            self.solution.cost.profile,
            epoch,
            self._timings(),
            in_use=len(self.solution.layout.machines),
        )

    def _is_tied(self, pools: int) -> bool:
        return pools > 1 and self.solution.cost.profile.tied_name is not None
