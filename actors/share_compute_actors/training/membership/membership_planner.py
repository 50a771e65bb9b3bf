"""Plans the membership of each epoch, and has members load the shards that they lack for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from share_compute.errors import ContributorLost, PlanInfeasible
from share_compute.lifecycle.attempt_events import Assignment, AttemptEvent, Note
from share_compute.planning.drift import plan_again
from share_compute.planning.planner import Solution
from share_compute.protocol.coordinator import PlanMembership
from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.messages import Form
from share_compute.quantities import listed
from share_compute.topology import Topology
from share_compute_actors.training.membership.changes import Changes
from share_compute_actors.training.membership.epochs import (
    Shares,
    computed_again,
    first_form,
    machines_lost,
    moved_form,
    next_form,
    standing,
)
from share_compute_actors.training.membership.performance_monitor import PerformanceMonitor
from share_compute_actors.training.membership.resharder import Resharder
from share_compute_actors.training.membership.takeover import Start
from share_compute_actors.training.step_log import GroupFacts, StepLog


class MembershipPlanner:
    """Plans the epochs of one attempt.

    Args:
        assignment: the attempt, with a fixed number of microbatches.
        start: the first plan; also the last epoch of the earlier attempt, if members are taken over.
        changes: requested changes to members and plan.
        resharder: moves shards between members.
        step_log: the step log, in which each epoch is written before members switch to its shards.
        monitor: provides the layer timings measured so far.
        report: receives events.
    """

    def __init__(
        self,
        assignment: Assignment,
        start: Start,
        changes: Changes,
        resharder: Resharder,
        step_log: StepLog,
        monitor: PerformanceMonitor,
        report: Callable[[AttemptEvent], None],
    ) -> None:
        self._spec = assignment.spec
        self._attempt = assignment.attempt
        self._runs = start.runs
        self.solution = start.solution
        """The solution that the members carry out."""
        self._changes = changes
        self._resharder = resharder
        self._step_log = step_log
        self._monitor = monitor
        self._report = report
        self._membership = start.takeover.facts.membership if start.takeover is not None else None
        self._before = self._membership, self.solution
        self.recomputed = 0
        """Number of microbatches that members compute again in the first step of the last planned epoch,
        because members were lost or layers moved."""

    def form(self, request: PlanMembership) -> Form:
        """Plan the next epoch for the members that reported, have them load its shards, and write it to the step log.

        Members switch to their loaded shards only after the epoch is in the step log. If the coordinator dies, its
        successor therefore finds each member's shard either in use or loaded.

        Raises:
            ContributorLost: some part of the model is lost, because no remaining member holds it.
            MembersLost: members died during the call.
            PlanInfeasible: the remaining members cannot hold the model.
            StaleEpoch: a member died while others loaded from it, or another coordinator has claimed the step log.
            WrongTensor: a member sent tensors that do not fit the shard of their receiver.
        """
        form = self._next(request)
        boundaries = self._spec.training.boundary_compression
        self._step_log.lay(
            GroupFacts(form.membership, self.solution.plan, self._runs, self._attempt, boundaries)
        )
        self._adopt()
        return form

    def _next(self, request: PlanMembership) -> Form:
        """Return the next epoch for the members that reported, and have them load the shards that they lack."""
        before = self._membership
        self._before = before, self.solution
        self._resharder.forget()
        leaving = self._changes.parting | request.without
        able = frozenset(request.reports) - leaving
        shares = self._changes.take_shares()
        wanted = self._changes.take_solution(able)
        if before is None:
            plan = self.solution.plan
            form = first_form(
                plan,
                request,
                is_tied=self._is_tied(len(plan.stages)),
                shares_optimizer=self._spec.parallelism.shares_optimizer,
                slices=self._spec.parallelism.sequence,
            )
            if not able >= set(form.membership.workers):
                form = self._without(form.membership, request, able, leaving, None)
        else:
            form = self._improved(before, wanted, request) or self._without(
                before, request, able, leaving, shares
            )
        if before is not None:
            self.recomputed = computed_again(before, form.membership, list(request.reports.values()))
        form = self._with_copies(form, before)
        self._membership = form.membership
        self.solution = standing(form.membership, self.solution)
        self._report_lost_pin(self._before[1])
        return form

    def _report_lost_pin(self, before: Solution) -> None:
        """Report that the pinned plan no longer holds, if the previous epoch carried it out and the next does not."""
        pinned, plan = self._spec.parallelism.plan, self.solution.plan
        if pinned is None or self.holds_pinned_plan or not before.plan.carries_out(pinned):
            return
        present = {member.name for stage in plan.stages for member in stage.members}
        gone = [name for name in pinned.names if name not in present]
        where = f"without {listed(gone)}" if gone else "with other layers on its machines"
        message = f"the pinned plan no longer holds: the job continues {where}"
        self._report(Note(message=message, level="warning"))
        plan = plan.model_copy(update={"strategy": self._spec.parallelism.strategy})
        self.solution = replace(self.solution, plan=plan)

    @property
    def holds_pinned_plan(self) -> bool:
        """Whether the members carry out the plan that the job pins."""
        return self.solution.plan.carries_out(self._spec.parallelism.plan)

    def _adopt(self) -> None:
        """Have members switch to the shards that they loaded; on an error, restore the previous membership and plan."""
        try:
            self._resharder.adopt()
        except BaseException:
            self._membership, self.solution = self._before
            raise

    def _with_copies(self, form: Form, before: Membership | None) -> Form:
        """Return the epoch with backup members and catch-up replicas added."""
        membership = form.membership
        backups = self._changes.backups(membership, before) if self._spec.parallelism.backups else {}
        replicas = self._changes.replicas(membership)
        return replace(form, membership=replace(membership, backups=backups, followers=replicas))

    def can_do_without(self, leaving: frozenset[Worker]) -> bool:
        """Return whether the job can continue without the leaving members.

        The job can continue if each stage keeps a member, or if the other members can hold the model.
        """
        assert self._membership is not None
        if all(not leaving.issuperset(stage) for stage in self._membership.stages):
            return True
        try:
            self._plan(frozenset(self._membership.workers) - leaving, self._membership.epoch + 1)
        except PlanInfeasible:
            return False
        return True

    def dispensable(self, pairs: Collection[tuple[Worker, Worker]]) -> Worker | None:
        """Return the member that all these pairs share, if the job can continue without this member; otherwise None.

        If the pairs share two members, prefer a member that is not alone in its stage. If both are alone, return
        the member whose removal gives the shorter predicted step time.
        """
        assert self._membership is not None
        workers = frozenset(self._membership.workers)
        predicted_s: dict[Worker, float] = {}
        ends = sorted(frozenset.intersection(*map(frozenset, pairs)))
        for worker in ends:
            if all(stage != (worker,) for stage in self._membership.stages):
                return worker  # no layer moves: the member is in no stage, or its stage has other members
            with suppress(PlanInfeasible):
                solution = self._plan(workers - {worker}, self._membership.epoch + 1)
                timeline = solution.timeline
                predicted_s[worker] = math.inf if timeline is None else timeline.step_s
        return min(predicted_s, key=lambda worker: predicted_s[worker], default=None)

    def _without(
        self,
        before: Membership,
        request: PlanMembership,
        able: frozenset[Worker],
        leaving: frozenset[Worker],
        shares: Shares | None,
    ) -> Form:
        """Return an epoch of the members in `able`.

        Members keep their shards if each stage has a member left and `Resharder.is_torn` is False. Otherwise the job is
        planned again, and members load the shards that they lack. If the shares of the optimizer's state of a stage
        change, its members load their new shares, if they have enough memory.
        """
        is_whole = all(not able.isdisjoint(stage) for stage in before.stages)
        if is_whole and not self._resharder.is_torn:
            form = next_form(before, request, self.solution.cost, leaving, shares)
            after = form.membership
            is_same = all(before.share_of(worker) == after.share_of(worker) for worker in after.workers)
            if is_same and (before.slices == 1 or before.stages == after.stages):
                return form
            solution = standing(after, self.solution)
            if solution.cost.fits(solution.layout):
                return form if is_same else self._moved(before, solution, request)
        if not able:
            raise machines_lost(self.solution.cost.topology, before.workers)
        return self._moved(before, self._plan(able, request.epoch), request)

    def _improved(self, before: Membership, wanted: Solution | None, request: PlanMembership) -> Form | None:
        """Return the first epoch of the better plan ``wanted``; None if ``wanted`` is None or cannot be carried out."""
        if wanted is None:
            return None
        try:
            return self._moved(before, wanted, request)
        except (PlanInfeasible, ContributorLost) as failure:
            self._changes.why = ""
            self._report(
                Note(message=f"the job keeps its plan, because the better plan failed: {failure.message}")
            )
            return None

    def _moved(self, before: Membership, solution: Solution, request: PlanMembership) -> Form:
        heirs = self._changes.heirs(solution, before)
        moved = self._resharder.load(
            before, solution.plan, request, self._step_log.updates(), heirs, self._changes.cut_off
        )
        self.solution = solution
        tied = self._is_tied(len(solution.plan.stages))
        return moved_form(
            before,
            solution.plan,
            request,
            moved,
            is_tied=tied,
            shares_optimizer=self._spec.parallelism.shares_optimizer,
            slices=self._spec.parallelism.sequence,
        )

    def _plan(self, able: frozenset[Worker], epoch: int) -> Solution:
        """Plan the job for the machines in `able`; see `plan_again`."""
        usable = self._changes.usable
        machines = Topology(
            tuple(machine for machine in usable.contributors if machine.id in able), usable.links
        )
        return plan_again(
            self._spec,
            machines,
            self.solution.cost.profile,
            epoch,
            self._monitor.timings(),
            in_use=len(self.solution.layout.machines),
        )

    def _is_tied(self, stages: int) -> bool:
        return stages > 1 and self.solution.cost.profile.tied_name is not None
