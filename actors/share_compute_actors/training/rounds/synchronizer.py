"""The coordinator of a job whose branches train apart and merge in rounds.

The synchronizer starts one coordinator for each branch, merges their contributions, and passes their events on. A
branch whose machines are lost continues on other machines of the job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from share_compute.errors import (
    ContributorLost,
    LinkLost,
    PlanInfeasible,
    ShardStoreLost,
    VerificationFailed,
)
from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEnded,
    AttemptEvent,
    BranchAssignment,
    CheckpointSaved,
    Note,
    ReplanProposed,
    RoundMerged,
)
from share_compute.lifecycle.branch_ids import branch_id
from share_compute.models.factory import dissect
from share_compute.models.storage.checkpoints import STATE
from share_compute.planning.branches import BranchPlace, island_topology, place_branches
from share_compute.quantities import listed
from share_compute.specification.boundaries import FixedBoundaryCompressionSpec
from share_compute.synchronization.aggregator import folder_bytes, payload_bytes
from share_compute.synchronization.aggregators import aggregator_of
from share_compute.synchronization.records import BranchRun, Contribution, MergeRecord
from share_compute.synchronization.rounds import (
    Contributed,
    MergeRecorded,
    RecordMerge,
    RoundEffect,
    RoundsMachine,
    TimeRead,
)
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.group.naming import members_of, workers_of
from share_compute_actors.training.preparation import suspended
from share_compute_actors.training.rounds.aggregation import Aggregation
from share_compute_actors.training.rounds.beginning import (
    aggregation_of,
    lost_state,
    own_checkpoint,
    prepare_data,
    recover,
    spec_of_branch,
    with_servers,
)
from share_compute_actors.training.rounds.branch_attempt import (
    BranchAttempt,
    await_ends,
    other_place,
    place_with_members,
    places_of,
)
from share_compute_actors.training.rounds.branch_events import BranchEvents
from share_compute_actors.training.rounds.messages import (
    BranchMail,
    BranchReport,
    BranchUpdate,
    BranchUpdates,
)
from share_compute_actors.training.rounds.relocation import Relocation
from share_compute_actors.training.shard_store import ShardStoreFacts
from share_compute_actors.training.step_log import StepLog, superseded

_POLL_S = 0.1
_MOST_RESTARTS = 5
"""Number of restarts of one branch without a contribution, after which the job fails."""
_MOST_UPDATES = 16
"""Number of rounds whose updates are kept for branches that are late; later ones begin with the newest weights."""
_RESTARTED = {ContributorLost.code, LinkLost.code, ShardStoreLost.code, PlanInfeasible.code}
"""Errors after which a branch is started again."""


class Synchronizer:
    """Trains the branches of one job, and merges them.

    Args:
        assignment: the job, and the machines that it may use.
        report: receives events.
        requests: control requests of the control plane.
        mail: reports of branches whose contributions are complete, and requests of the branches.
        start_branch: starts the coordinator of a branch on this node, and returns its actor.
    """

    def __init__(
        self,
        assignment: Assignment,
        report: Callable[[AttemptEvent], None],
        requests: ControlRequests,
        mail: BranchMail,
        start_branch: Callable[[Assignment], Any],
    ) -> None:
        policy = assignment.spec.training.rounds
        assert policy is not None
        self._report = report
        self._requests = requests
        self._mail = mail
        self._start_branch = start_branch
        self._policy = policy
        self._topology = assignment.topology
        self._assignment = assignment
        self._aggregation: Aggregation | None = None
        self._branches: list[BranchAttempt] = []
        self._contributions: dict[BranchRun, tuple[BranchReport, float]] = {}
        """Reports of contributions that are not merged yet, each with the time of its arrival in seconds."""
        self._relocation: Relocation | None = None
        self._events = BranchEvents(self._branches, report, assignment.known_step)
        self._forwarded: tuple[Any, frozenset[str]] = (None, frozenset())
        """Latest offer and machines to leave that the branches know."""

    def run(self) -> AttemptEnded:
        """Train all rounds, and return the event that reports success.

        Raises:
            Cancelled: the submitter cancelled the job.
            ShareComputeError: the attempt failed.
        """
        with closing(StepLog(self._assignment.folder, self._assignment.attempt)) as step_log:
            step_log.claim()
            self._step_log = step_log
            try:
                self._begin()
                return self._train()
            finally:
                self._end_branches(is_over=step_log.is_claimed)
                if self._aggregation is not None:
                    keeps = not self._machine.is_over and not self._requests.cancelled.is_set()
                    self._aggregation.close(is_over=step_log.is_claimed, keeps=keeps)
                if self._relocation is not None:
                    self._relocation.close()

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        facts = prepare_data(self._assignment, self._requests, self._note)
        profile = dissect(facts.blueprint)
        places = place_branches(self._assignment.spec, self._topology, profile)
        spec = with_servers(self._assignment, self._topology, profile)
        self._assignment = self._assignment.model_copy(update={"spec": spec})
        self._aggregator = aggregator_of(self._assignment.folder / "rounds", spec.training)
        version = self._recover(facts, places)
        records = self._step_log.merges()
        self._machine = RoundsMachine(self._policy, self._policy.rounds(spec.training.steps), records)
        self._aggregation = aggregation_of(
            self._assignment,
            self._aggregator,
            version,
            self,
            self._mail,
            self._note,
            self._requests.cancelled,
        )
        state = json.loads((self._aggregator.version_folder(version) / STATE).read_text())
        self._state: dict[str, Any] = state
        self._events.validations = [(step, figures) for step, figures in state["validations"]]
        spec = spec.with_first_boundaries(FixedBoundaryCompressionSpec.model_validate(state["boundaries"]))
        self._relocation = Relocation(spec, profile, self._report)
        chosen = {number: place for place in places for number in place.branches}
        for number in range(self._policy.branches):
            held = set(workers_of(self._id_of(number)).values())
            place = place_with_members(chosen[number], held, self._topology)
            self._branches.append(BranchAttempt(number, place, self._start_branch))
        for branch in self._branches:
            self._begin_if_free(branch, partial(self._begin_again, branch), keeps_members=True)

    def _begin_if_free(
        self, branch: BranchAttempt, begin: Callable[[], object], *, keeps_members: bool
    ) -> None:
        """Call ``begin`` now, or once the branch, which has no coordinator, no longer waits for others.

        Kept members hold the branch's state, and also wait for its update under their next coordinator.
        """
        number = branch.number
        branch.has_ended, branch.begins_later = True, begin
        has_members = keeps_members and not self._machine.is_done(number) and members_of(self._id_of(number))
        if has_members or not self._machine.has_to_wait(number):
            begin()

    def _begin_waiting_branches(self) -> None:
        """Begin branches that waited for others; once the job is over, only the first, which saves the result."""
        branches = self._branches[:1] if self._machine.is_over else self._branches
        for branch in branches:
            if branch.begins_later is not None and not self._machine.has_to_wait(branch.number):
                branch.begins_later()

    def _recover(self, facts: ShardStoreFacts, places: Sequence[BranchPlace]) -> int:
        """Return the version from which the job continues; see `beginning.recover`."""
        recorded = max((record.version for record in self._step_log.merges()), default=0)
        version = recover(self._assignment, self._aggregator, recorded, facts, places)
        if version < recorded:
            self._note(
                f"the weights after round {recorded} are damaged: round {version + 1} is the next one",
                "warning",
            )
            self._step_log.unmerge(version)
            for number in range(self._policy.branches):  # they have the weights that are lost
                self._kill_members(number)
        return version

    def _assignment_of(self, branch: BranchAttempt) -> Assignment:
        """Return the assignment with which a branch begins or continues."""
        assignment, number, newest = self._assignment, branch.number, self._machine.version
        checkpoint, version = self._aggregator.beginning(newest, number)
        step: int | None = self._steps(number)
        folder = assignment.folder
        if number > 0:
            folder = folder / "branches" / f"{number:04}"
        folder.mkdir(parents=True, exist_ok=True)
        own = own_checkpoint(folder)
        if own is not None and self._continues(own[1], version, number):
            checkpoint, version, step = *own, None
        return assignment.model_copy(
            update={
                "job_id": self._id_of(number),
                "spec": spec_of_branch(assignment.spec, number),
                "topology": island_topology(self._topology, branch.place),
                "folder": folder,
                "checkpoint": checkpoint,
                "known_step": self._events.known_step if number == 0 else 0,
                "checkpoint_every_s": None,  # the weights of each version are on the server
                "branch": BranchAssignment(
                    number=number,
                    version=version,
                    start=branch.starts + 1,
                    step=step,
                    data=assignment.folder / "data",
                ),
            }
        )

    def _continues(self, version: int, newest: int, number: int) -> bool:
        """Return whether a branch continues from its own checkpoint with the weights of a version.

        With a parameter server, a branch may push a change of older weights. A branch that continues to train while its
        round is merged may not have the update yet.
        """
        may_be_old = self._policy.merges_apart or self._policy.overlapping > 0
        is_old = may_be_old and self._aggregator.follows(version, newest, number)
        is_known = self._machine.last_round(number) <= version + 1  # else it would train merged rounds again
        return version == newest or (is_old and version < newest and is_known)

    def _steps(self, number: int) -> int:
        """Return the number of steps of a branch that the merged weights include.

        Branches that merge together continue with the common weights, so a late branch skips its missed steps.
        """
        steps, skips_missed = self._assignment.spec.training.steps, self._policy.skips_missed
        rounds = self._machine.version if skips_missed else self._machine.clock(number)
        return steps if self._machine.is_over else self._policy.steps_after(rounds, steps)

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self) -> AttemptEnded:
        """Merge contributions until the first branch, which saves the result, has ended."""
        while True:
            self._pass_requests_on()
            while not self._mail.reports.empty():
                self._on_report(self._mail.reports.get())
            self._merges.poll()
            calls = {branch.call: branch for branch in self._branches if not branch.has_ended}
            if not calls:  # all branches wait for a merge, and none has a coordinator
                self._requests.cancelled.wait(_POLL_S)
            for ref in ray.wait(list(calls), num_returns=len(calls), timeout=_POLL_S)[0] if calls else ():
                ended = self._take_events(calls[ref])
                if ended is not None:
                    return ended
            self._carry_out(self._machine.handle(TimeRead(time.monotonic())))

    def _pass_requests_on(self) -> None:
        """Pass changes of machines on to the branches; end the attempt if the control plane requested this."""
        if self._requests.cancelled.is_set():
            raise Cancelled
        if self._requests.suspended.is_set():
            self._ask_all("suspend")
            await_ends(self._branches)
            raise suspended(f"in round {self._machine.open_round}")
        offer, leaving = self._requests.offered, self._requests.leaving
        known_offer, known_leaving = self._forwarded
        if offer is not None and offer is not known_offer:
            self._topology = offer.topology
            for branch in self._branches:
                branch.offer(offer.topology)
            if self._relocation is not None:
                self._relocation.answer(offer)
        if offer is not known_offer or leaving != known_leaving:
            self._merges.offer(self._topology, leaving)
        for machine in sorted(leaving - known_leaving):
            for branch in self._branches:
                if machine in branch.place.machines:
                    branch.request("drain", machine)
        self._forwarded = offer, leaving
        self._look_for_better_places()

    def _look_for_better_places(self) -> None:
        """Propose to move branches to machines that joined."""
        assert self._relocation is not None
        left = self._policy.rounds(self._assignment.spec.training.steps) - self._machine.rounds_done
        if all(branch.has_begun for branch in self._branches) and not self._machine.is_over:
            places = places_of(self._branches)
            self._relocation.consider(self._topology, places, left)
            self._relocation.propose(self._events.known_step, left)

    def _move(self) -> None:
        """Ask branches that will move to save their state; they end, and restart on other machines."""
        assert self._relocation is not None
        left = {machine.id for machine in self._topology.contributors} - self._requests.leaving
        for number, place in self._relocation.take(left).items():
            branch = self._branches[number]
            if place.machines == branch.place.machines:
                branch.place = place
            elif not branch.has_ended:
                branch.moves_to = place
                branch.request("suspend")

    def _take_events(self, branch: BranchAttempt) -> AttemptEnded | None:
        """Handle new events of a branch; return the success of the first branch."""
        try:
            events = branch.take_events()
        except RayError:
            branch.kill()
            self._restart(branch, f"the coordinator of branch {branch.number} died", moves=False)
            return None
        for event in events:
            if isinstance(event, AttemptEnded):
                branch.has_ended = True
                return self._on_ended(branch, event)
            if isinstance(event, ReplanProposed):
                branch.offer(self._topology, event.step)
            else:
                self._events.pass_on(branch, event)
        return None

    def _on_ended(self, branch: BranchAttempt, event: AttemptEnded) -> AttemptEnded | None:
        if event.outcome == "succeeded":
            return event if branch.number == 0 else None
        if not self._step_log.is_claimed:
            raise superseded()
        error = event.error or {}
        if error.get("code") not in _RESTARTED:
            return event
        if branch.moves_to is not None:
            branch.place = branch.moves_to
            self._note(f"branch {branch.number} continues on {self._names(branch.place.machines)}")
            self._begin_if_free(branch, partial(self._begin_again, branch), keeps_members=False)
            return None
        is_attached = error.get("code") in (LinkLost.code, ShardStoreLost.code)
        self._restart(branch, event.reason, moves=not is_attached)
        return None

    def _restart(self, branch: BranchAttempt, why: str, *, moves: bool) -> None:
        """Restart a branch, on other machines if its own may be lost, and only once it need not wait for others."""
        restart = partial(self._restart_now, branch, why, moves=moves)
        self._begin_if_free(branch, restart, keeps_members=not moves)

    def _restart_now(self, branch: BranchAttempt, why: str, *, moves: bool) -> None:
        """Restart a branch that need not wait for others.

        Raises:
            ContributorLost: no machine is left, or the branch was restarted too often.
        """
        if branch.restarts >= _MOST_RESTARTS:
            raise ContributorLost(
                f"branch {branch.number} was started {_MOST_RESTARTS + 1} times without a contribution: {why}",
                hint="look at the job's log for the machines that were lost",
            )
        branch.restarts += 1
        if moves:
            assert self._relocation is not None
            left = {machine.id for machine in self._topology.contributors} - self._requests.leaving
            can_hold = partial(self._relocation.can_hold, self._topology)
            branch.place = other_place(branch, self._branches, left, can_hold, why)
        assignment = self._begin_again(branch)
        names = self._names(branch.place.machines)
        loss = f"; {lost_state(assignment)}" if moves else ""
        self._note(f"branch {branch.number} is started again on {names}{loss}: {why}", "warning")

    def _begin_again(self, branch: BranchAttempt) -> Assignment:
        """Start a coordinator for a branch that had one before, and return its assignment."""
        assignment = self._assignment_of(branch)
        assert assignment.branch is not None
        if assignment.branch.step is not None:  # not from the branch's own checkpoint
            own = [run for run in self._contributions if run.branch == branch.number]
            withdrawn = self._machine.withdraw(branch.number)
            for run in withdrawn + [run for run in own if self._machine.may_forget(run)]:
                self._drop(run, "the branch begins the round again")
        branch.begin(assignment)
        return assignment

    def _drop(self, run: BranchRun, why: str = "") -> None:
        """Remove a contribution that is not used; ``why`` is the reason for the job's log."""
        if run in self._contributions:
            report, _ = self._contributions.pop(run)
            self._merges.drop(report)
            if why:
                self._note_unused(run, why)

    def _note_unused(self, run: BranchRun, why: str) -> None:
        what = f"the contribution of branch {run.branch} to round {run.round}"
        self._note(f"{what} is not used: {why}", "warning")

    # -- contributions -----------------------------------------------------------------------------------------------

    @property
    def _merges(self) -> Aggregation:
        assert self._aggregation is not None
        return self._aggregation

    def _on_report(self, report: BranchReport) -> None:
        branch = next((each for each in self._branches if each.number == report.branch), None)
        if branch is None or report.start != branch.starts or report.round > self._machine.open_round:
            return  # from a replaced coordinator, or from no branch
        branch.base = branch.oldest = report.round - 1
        branch.waiting = report
        if self._machine.has(report.run):
            self._answer(branch)
        else:
            self._contributions[report.run] = report, time.monotonic()
            self._merges.take(report)

    def accept(self, report: BranchReport, digest: str) -> None:
        """Include a contribution in later merges; see `MergeListener.accept`."""
        branch = self._branches[report.branch]
        if report.start == branch.starts:
            branch.restarts = 0
        contribution = Contribution(report.run, float(report.samples), digest)
        self._carry_out(self._machine.handle(TimeRead(time.monotonic())))  # the grace period begins now
        self._carry_out(self._machine.handle(Contributed(contribution)))
        self._answer(branch)

    def refuse(self, report: BranchReport, failure: VerificationFailed) -> None:
        """Restart a branch's round with new members, if possible on other machines."""
        branch = self._branches[report.branch]
        self._drop(report.run)  # the next line of the log contains the reason
        branch.kill()
        self._kill_members(branch.number)
        self._restart(branch, failure.message, moves=True)

    def request_again(self, report: BranchReport) -> None:
        """Ask a branch to resend its contribution, if the branch still waits for the merge."""
        self._contributions.pop(report.run, None)
        branch = self._branches[report.branch]
        if branch.waiting is not None and branch.waiting.run == report.run:
            branch.request_again(report)
        else:
            self._note_unused(report.run, "machines with ranges of the weights lost it")

    def restart_round(self, why: str) -> None:
        """Ask all branches that wait for a merge to resend their contributions."""
        self._note(f"{why}: the contributions to round {self._machine.open_round} are sent again", "warning")
        self._machine.restart_round()
        lost, self._contributions = self._contributions, {}
        for report, _ in lost.values():
            self.request_again(report)
        self._begin_waiting_branches()

    def _carry_out(self, effects: Iterable[RoundEffect]) -> None:
        for effect in effects:
            if isinstance(effect, RecordMerge):
                self._merge(effect.record)
            else:
                self._drop(effect.run, effect.reason)

    def _merge(self, record: MergeRecord) -> None:
        """Let a merge be computed; `commit` follows."""
        self._began_s = time.monotonic()
        rounds = self._machine.rounds_with(record)
        step = self._policy.steps_after(rounds, self._assignment.spec.training.steps)
        self._state |= {"step": step, "version": record.version, "validations": self._events.validations}
        self._merges.merge(record, {run: self._contributions[run][0] for run in record.runs}, self._state)

    def commit(self, record: MergeRecord, distance: float | None) -> None:
        """Store the record of a computed merge; then send the update to all waiting branches."""
        began_s, step = self._began_s, int(self._state["step"])
        found = {run: self._contributions.pop(run) for run in record.runs}
        missing = () if self._policy.merges_apart else self._machine.missing(record.runs)
        version = record.version
        self._step_log.merge(record)
        self._report(
            RoundMerged(
                round=version,
                step=step,
                branches=tuple(
                    self._branches[report.branch].figures(
                        report, 0.0 if self._policy.overlapping else began_s - arrived_s
                    )
                    for report, arrived_s in found.values()
                ),
                missing=missing,
                update_bytes=max(
                    payload_bytes(self._aggregator.update_folder(version, run.branch)) for run in found
                ),
                weight_bytes=self._aggregator.weight_bytes,
                consensus_distance=distance,
                merge_s=time.monotonic() - began_s,
            )
        )
        folder = self._aggregator.version_folder(version)
        self._report(CheckpointSaved(step=step, path=folder, size_bytes=folder_bytes(folder)))
        for report, _ in found.values():
            self._merges.drop(report)
        self._carry_out(self._machine.handle(MergeRecorded(record)))
        self._begin_waiting_branches()
        for branch in self._branches:
            self._answer(branch)
        if not self._machine.is_over:
            self._move()
        newest, oldest = self._machine.version, min(branch.oldest for branch in self._branches)
        loading = [branch.base for branch in self._branches if not branch.has_begun]
        if self._policy.keeps_own_weights:  # the first branch may evaluate the weights after its round
            loading.append(self._branches[0].sent)
        kept = _MOST_UPDATES * (self._policy.branches if self._policy.merges_apart else 1)
        self._merges.prune(newest, max(oldest, newest - kept), loading)

    def _answer(self, branch: BranchAttempt) -> None:
        """Send a waiting branch the updates with which it continues, unless it must wait for other branches."""
        report = branch.waiting
        if report is None or (report.run in self._contributions and not self._machine.has(report.run)):
            return  # the branch keeps its contribution until all machines of the ranges have the contribution
        versions = self._machine.updates(report.run)
        if versions is None and not self._machine.is_over:
            return
        versions = versions or range(0)
        base, number = report.round - 1, branch.number
        updates = tuple(
            BranchUpdate(
                version=version,
                before=base if version == versions.start else version - 1,
                folder=self._aggregator.update_folder(version, number),
                servers=servers,
                payloads=payloads,
            )
            for version in versions
            for servers, payloads in (self._merges.sources(version),)
        )
        if all(update.folder.is_dir() for update in updates):
            is_over = self._machine.is_over
            evaluates = number == 0 and self._policy.keeps_own_weights and not is_over
            merged = self._aggregator.version_folder(versions.stop - 1) if evaluates else None
            branch.update(BranchUpdates(base=base, updates=updates, is_over=is_over, merged=merged))
        else:
            branch.kill()
            self._kill_members(branch.number)
            self._restart(branch, "it is too late for the updates of the rounds that it missed", moves=False)

    # -- the log -----------------------------------------------------------------------------------------------------

    def _note(self, message: str, level: Literal["info", "warning", "error"] = "info") -> None:
        self._report(Note(message=message, level=level))

    def _names(self, machines: Iterable[str]) -> str:
        known = {each.id: each.name for each in self._topology.contributors}
        return listed(sorted(known.get(machine, machine) for machine in machines))

    # -- the end -----------------------------------------------------------------------------------------------------

    def _id_of(self, number: int) -> str:
        """Return the id under which the members of a branch run."""
        job_id = self._assignment.job_id
        return branch_id(job_id, number) if number else job_id

    def _kill_members(self, number: int) -> None:
        for member in members_of(self._id_of(number)):
            ray.kill(member)

    def _ask_all(self, method: str) -> None:
        for branch in self._branches:
            branch.request(method)

    def _end_branches(self, *, is_over: bool) -> None:
        """End the coordinators of all branches.

        Args:
            is_over: whether to end the members as well. If not, another attempt continues with them.
        """
        if is_over:
            self._ask_all("cancel")
            await_ends(self._branches)
        for branch in self._branches:
            branch.kill()
