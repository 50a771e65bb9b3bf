"""The training of one attempt, from members that hold the model to the saved result.

`Conductor` runs the steps, and reports to `TrainingRun` through the methods of `Listener`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from share_compute.lifecycle.attempt_events import (
    Assignment,
    Note,
    Planned,
    Reformed,
    Started,
    TargetReached,
    TrafficMeasured,
)
from share_compute.protocol.membership import Membership, Worker
from share_compute.quantities import listed
from share_compute.training.loss_scale import NotFinite
from share_compute.training.metrics import Figures
from share_compute_actors.messages import StepFigures
from share_compute_actors.training.coordinator.branch_rounds import BranchRounds
from share_compute_actors.training.coordinator.checkpoint_manager import CheckpointManager
from share_compute_actors.training.coordinator.conductor import Conductor
from share_compute_actors.training.coordinator.connections import Connections
from share_compute_actors.training.coordinator.evaluation import Evaluation
from share_compute_actors.training.coordinator.pauses import MissedWork, Pauses
from share_compute_actors.training.coordinator.progress import Listener, TrainingProgress
from share_compute_actors.training.coordinator.verdict import Verdict
from share_compute_actors.training.faults import with_faults
from share_compute_actors.training.membership.balancing import Balancer
from share_compute_actors.training.membership.changes import Changes
from share_compute_actors.training.membership.cuts import LinksCut
from share_compute_actors.training.membership.membership_planner import MembershipPlanner
from share_compute_actors.training.membership.performance_monitor import PerformanceMonitor
from share_compute_actors.training.membership.resharder import Resharder
from share_compute_actors.training.membership.takeover import Start
from share_compute_actors.training.membership.traffic_reports import TrafficReports
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.training.step_log import StepFacts, StepLog


class TrainingRun(Listener):
    """Trains with the members of a worker group, and saves checkpoints and the result.

    Args:
        assignment: the attempt, with a fixed number of microbatches.
        start: plan and training state that the members begin with.
        shard_store: the shard store's actor.
        group: the members, each with its shard.
        step_log: the step log of the job, claimed by this attempt.
        connections: connections of the attempt.
    """

    def __init__(
        self,
        assignment: Assignment,
        start: Start,
        shard_store: Any,
        group: TrainingGroup,
        step_log: StepLog,
        connections: Connections,
    ) -> None:
        report, requests = connections.report, connections.requests
        spec = assignment.spec
        self._assignment = assignment
        self._start = start
        self._group = group
        self._step_log = step_log
        self._report = report
        self._training = spec.training
        layout = spec.parallelism
        # A catch-up replica copies the whole state of one member, but here each member has only a share of the state.
        can_shadow = layout.backups and not layout.shares_optimizer
        self._changes = Changes(
            group, requests, report, can_shadow=can_shadow, quarantined=step_log.quarantined()
        )
        self._balancer = Balancer()
        self._monitor = PerformanceMonitor(assignment, start.solution, report, self._changes)
        self._progress = TrainingProgress(spec, start.state, report)
        self._planner = MembershipPlanner(
            assignment,
            start,
            self._changes,
            Resharder(group, start.facts.first_step, shares_optimizer=layout.shares_optimizer),
            step_log,
            self._monitor,
            report,
        )
        self._conductor = with_faults(Conductor, assignment.failures)(
            group, step_log, self._planner, self, connections.inbox, spec.training, self._changes, report
        )
        self._evaluation = Evaluation(spec, start.facts, shard_store, group, self._conductor, report)
        self._checkpoints = CheckpointManager(
            shard_store, group, self._conductor, assignment, report, requests
        )
        self._traffic = TrafficReports(
            self._report_traffic, () if start.takeover is None else start.takeover.actors
        )
        self._pauses = Pauses(spec.training, start.facts.sizes, is_first_branch=self._is_first_branch)
        self._synchronizer = connections.synchronizer
        self._rounds: BranchRounds | None = None
        self._began_s = time.monotonic()
        if assignment.branch is not None:
            self._rounds = BranchRounds(
                assignment,
                connections,
                group,
                self._conductor,
                self._checkpoints,
                shard_store,
                step_log,
                self._changes.protection,
            )

    def run(self) -> str:
        """Train and save the result; return the reason why training ended.

        Raises:
            Cancelled: the submitter cancelled the job.
            ShareComputeError: the attempt failed.
        """
        with self._monitor:
            with self._saving_when_cut():
                self._conductor.assemble()
            self._begin()
            with self._checkpoints.salvaging(), self._saving_when_cut():
                self._train()
            if self._is_first_branch:
                self._checkpoints.result(self._progress.state)
        self._traffic.observe(self._group.statuses(), self._progress.state.step)
        self._traffic.report(self._progress.state.step)
        self._report_busy_fractions()
        return self._progress.reason

    def _begin(self) -> None:
        """Report committed steps that the control plane does not know about, and then the start of training.

        If members were taken over, report their plan first.
        """
        self._balancer.reform(self._conductor.membership)
        if self._start.takeover is not None:
            self._monitor.reform(self._planner.solution, are_lost=True)
            self._report(Planned(plan=self._planner.solution.plan))
        for step in self._step_log.steps(after=self._assignment.known_step):
            self._report(step.event)
        self._changes.protection.reform(self._conductor.membership)
        self._began_s = time.monotonic()
        first_step = self._start.state.step + 1
        self._report(Started(first_step=first_step, total_steps=self._training.steps))

    def _report_busy_fractions(self) -> None:
        rest = "other machines and for the server" if len(self._group.workers) > 1 else "the server"
        for worker, share in self._progress.busy_fractions().items():
            name = self._group.name(worker)
            message = f"{name} computed {share:.0%} of the time; the rest went into waiting for {rest}"
            self._report(Note(message=message))

    def _report_traffic(self, event: TrafficMeasured) -> None:
        """Report the traffic of all branches as events of the job, because each branch has its own machines."""
        if self._synchronizer is None:
            self._report(event)
        else:
            self._synchronizer.exchanged.remote(event.model_dump_json())

    def _contributed(self) -> None:
        """Add up the traffic of a round. The last merge may end the job, so report the traffic before it."""
        step = self._progress.state.step
        self._traffic.observe(self._conductor.at_pause(self._group.ask_statuses), step)
        if step == self._training.steps:
            self._traffic.report(step)

    # -- the training loop -------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Run all remaining steps and the work at each pause; then test the model if there are test samples."""
        progress = self._progress
        # An earlier coordinator may have died between the last step and the work that follows it.
        is_merging = self._step_log.is_merging(progress.state.step)
        if self._rounds is not None:
            self._rounds.resume(progress.state, self._contributed)
            is_merging = is_merging or self._rounds.is_due(progress.state.step)
        step = progress.state.step
        has_trained = self._start.state.step >= self._start.facts.first_step
        missed = self._pauses.missed(progress.state, has_trained=has_trained, is_merging=is_merging)
        if missed is MissedWork.pause:
            self._between(step)
        elif missed is MissedWork.validation:
            self._evaluate(step)
            self._save_after(step)
        while not progress.has_ended:
            following = range(progress.state.step + 1, self._training.steps + 1)
            step = next(number for number in following if self._pauses.is_after(number))
            progress.begin_steps()
            self._steps(step)
            self._between(step)
            if not progress.has_ended:
                self._change()  # if each step is followed by a pause, `_steps` made no changes
        if self._start.facts.sizes["test"] and self._is_first_branch:
            progress.tested(self._evaluation.figures("test", progress.state.step))

    def _steps(self, until: int) -> None:
        """Run the steps up to `until`. At each earlier pause, save a checkpoint and make changes if they are due."""
        try:
            while self._conductor.steps(until) < until:
                self._change()
        except NotFinite as failure:
            raise self._evaluation.locate(failure) from failure

    def _between(self, step: int) -> None:
        """Merge branches, validate, generate sample texts and save a checkpoint after a step, each if it is due."""
        if self._rounds is not None:
            self._merge_after(step, self._rounds)
            self._evaluation.show_merged(self._rounds.merged)
        if self._is_first_branch:
            self._evaluate(step)
        self._save_after(step)

    def _evaluate(self, step: int) -> None:
        """Validate and generate sample texts after a step, each if it is due."""
        training, progress = self._training, self._progress
        if self._pauses.validates_after(step) or (
            progress.has_ended and self._start.facts.sizes["validation"]
        ):
            figures = self._evaluation.figures("validation", step)
            self._step_log.validated(step, figures)
            if progress.validated(step, figures):
                self._report_target(step, figures)
        if training.samples is not None and step % training.samples.every == 0:
            self._evaluation.sample(training.samples, step)

    def _report_target(self, step: int, figures: Figures) -> None:
        target = self._training.target
        assert target is not None
        self._traffic.observe(self._conductor.at_pause(self._group.ask_statuses), step)
        self._report(
            TargetReached(
                step=step,
                metric=target.figure,
                value=figures[target.figure],
                seconds=time.monotonic() - self._began_s,
                sent_bytes=self._traffic.sent_bytes,
            )
        )

    def _merge_after(self, step: int, rounds: BranchRounds) -> None:
        """Contribute to a merge if a round ends after a step, and apply a merge if it is due.

        Merges overlap with training, unless other work after the step needs the merged weights.
        """
        ends = self._pauses.ends_round(step)
        if rounds.is_open and (ends or rounds.is_due(step)):
            self._apply_merge(rounds)
        if ends and not self._progress.was_ended:
            rounds.contribute(self._progress.state, self._contributed)
            needs_merged = self._pauses.has_work_after(step) or step == self._training.steps
            if rounds.is_open and (needs_merged or rounds.is_due(step)):
                self._apply_merge(rounds)

    def _apply_merge(self, rounds: BranchRounds) -> None:
        if rounds.merge(self._progress.state, self._contributed):
            self._progress.end("all rounds are merged")

    @property
    def _is_first_branch(self) -> bool:
        """Whether this attempt saves the result and evaluates the model, which the other branches hold, too."""
        branch = self._assignment.branch
        return branch is None or branch.number == 0

    def _save_after(self, step: int) -> None:
        training, progress = self._training, self._progress
        is_last = progress.has_ended and self._is_first_branch
        if is_last or (training.checkpoint_every and step % training.checkpoint_every == 0):
            self._checkpoints.checkpoint(progress.state, waits=progress.has_ended)

    def _change(self) -> None:
        """Save a checkpoint if it is needed, and make the changes that are due."""
        self._save_before_change()
        self._conductor.change()

    def _save_before_change(self) -> None:
        """Save a checkpoint if one is due, or if the job cannot continue without the leaving members.

        Then wait for a save in progress if it fetches data from a leaving member.
        """
        self._checkpoints.checkpoint_if_due(self._progress.state)
        leaving = self._changes.leaving
        if leaving and not self._planner.can_do_without(leaving):
            self._checkpoints.checkpoint(self._progress.state, waits=True)
        self._checkpoints.release(leaving)

    @contextmanager
    def _saving_when_cut(self) -> Iterator[None]:
        """When the context raises `LinksCut`, save a checkpoint if any step followed the starting state."""
        try:
            yield
        except LinksCut:
            if self._progress.state.step >= self._start.facts.first_step:
                self._checkpoints.checkpoint(self._progress.state, waits=True)
            raise

    # -- reports of the conductor ------------------------------------------------------------------------------------

    def account(self, step: int, verdict: Verdict, figures: Mapping[Worker, StepFigures]) -> StepFacts:
        """See `Listener.account`."""
        return self._progress.account(step, verdict, figures)

    def committed(self, facts: StepFacts, figures: Mapping[Worker, StepFigures]) -> None:
        """Report a committed step, and look for a better plan and better shares of microbatches."""
        self._progress.committed(facts, figures)
        step = facts.event.step
        self._monitor.observe(step, facts.event.seconds, figures)
        shares = self._balancer.observe(step, figures, self._training.steps - step)
        if shares is not None and not self._planner.holds_pinned_plan:
            self._changes.share(shares)

    def reformed(
        self, before: Membership, after: Membership, lost: frozenset[Worker], seconds: float
    ) -> None:
        """Report a new epoch with its causes, and restart the measurements of step times and cell times."""
        self._monitor.reform(self._planner.solution, are_lost=bool(lost))
        self._balancer.reform(after)
        joined = frozenset(after.workers) - frozenset(before.workers)
        left = frozenset(before.workers) - frozenset(after.workers) - lost
        event = Reformed(
            epoch=after.epoch,
            step=after.step,
            plan=self._planner.solution.plan,
            lost=tuple(sorted(lost)),
            joined=tuple(sorted(joined)),
            left=tuple(sorted(left)),
            seconds=seconds,
            recomputed=self._planner.recomputed,
            sentence=self._causes(lost, left, joined),
        )
        self._changes.report_reformed(event, after)

    def _causes(self, lost: frozenset[Worker], left: frozenset[Worker], joined: frozenset[Worker]) -> str:
        """Return the causes of a new epoch, for the user."""
        causes = [
            f"{listed(sorted(map(self._group.name, workers)))} {verb}"
            for workers, verb in ((lost, "lost"), (left, "left"), (joined, "joined"))
            if workers
        ]
        if self._changes.why:
            causes.append(self._changes.why)
        if not causes:
            retried = "a message was lost; members began the step again"
            causes.append(retried if self._changes.is_broken else "members connected again")
        return "; ".join(causes)

    def ticked(self) -> None:
        """Poll the save in progress and the backup copies, and add up the members' traffic."""
        self._traffic.observe(self._group.detector.heartbeats, self._progress.state.step)
        self._checkpoints.poll()
        self._changes.protection.poll(self._progress.state.step)
