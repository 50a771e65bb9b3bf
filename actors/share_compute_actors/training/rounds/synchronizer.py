"""The coordinator of a job whose branches train apart and merge in rounds.

The synchronizer starts one coordinator for each branch, merges their contributions, and passes their events on. A
branch whose machines are lost continues on other machines of the job.
"""

from __future__ import annotations

import json
import queue
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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
from share_compute.planning.branches import BranchPlace, island_topology, neighbours, place_branches
from share_compute.planning.planner import solve
from share_compute.quantities import listed
from share_compute.specification import TrainJob
from share_compute.specification.boundaries import FixedBoundaryCompressionSpec
from share_compute.specification.synchronization import GossipSpec, LocalSpec
from share_compute.synchronization.aggregator import payload_bytes
from share_compute.synchronization.aggregators import EDGES, aggregator_of
from share_compute.synchronization.records import BranchRun, Contribution, MergeRecord
from share_compute.synchronization.rounds import (
    Contributed,
    MergeRecorded,
    RecordMerge,
    RoundEffect,
    RoundsMachine,
    TimeRead,
)
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.group.naming import members_of, workers_of
from share_compute_actors.training.membership.control_requests import ControlRequests
from share_compute_actors.training.preparation import prepare, suspended
from share_compute_actors.training.rounds.beginning import (
    beginning_facts,
    initial_shards,
    lost_state,
    own_checkpoint,
)
from share_compute_actors.training.rounds.branch_attempt import BranchAttempt, other_place, places_of
from share_compute_actors.training.rounds.branch_events import BranchEvents
from share_compute_actors.training.rounds.messages import BranchReport, BranchUpdate, BranchUpdates
from share_compute_actors.training.rounds.relocation import Relocation
from share_compute_actors.training.shard_store import ShardStore, ShardStoreFacts
from share_compute_actors.training.step_log import StepLog, superseded

_POLL_S = 0.1
_END_S = 30.0
"""Time in which the coordinators of branches end after a request, in seconds; then they are killed."""
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
        reports: reports of branches whose contributions are complete.
        start_branch: starts the coordinator of a branch on this node, and returns its actor.
    """

    def __init__(
        self,
        assignment: Assignment,
        report: Callable[[AttemptEvent], None],
        requests: ControlRequests,
        reports: queue.SimpleQueue[BranchReport],
        start_branch: Callable[[Assignment], Any],
    ) -> None:
        policy = assignment.spec.training.rounds
        assert policy is not None
        self._assignment = assignment
        self._report = report
        self._requests = requests
        self._reports = reports
        self._start_branch = start_branch
        self._policy = policy
        self._topology = assignment.topology
        self._aggregator = aggregator_of(assignment.folder / "rounds", assignment.spec.training)
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
                if self._relocation is not None:
                    self._relocation.close()

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        facts = self._prepare()
        spec, profile = self._assignment.spec, dissect(facts.blueprint)
        places = place_branches(spec, self._topology, profile)
        version = self._recover(facts, places)
        training = self._assignment.spec.training
        records = self._step_log.merges()
        self._machine = RoundsMachine(self._policy, self._policy.rounds(training.steps), records)
        state = json.loads((self._aggregator.version_folder(version) / STATE).read_text())
        self._state: dict[str, Any] = state
        self._events.validations = [(step, figures) for step, figures in state["validations"]]
        spec = spec.with_first_boundaries(FixedBoundaryCompressionSpec.model_validate(state["boundaries"]))
        self._relocation = Relocation(spec, profile, self._report)
        chosen = {number: place for place in places for number in place.branches}
        for number in range(self._policy.branches):
            place = self._place_with_members(number, chosen[number])
            self._branches.append(BranchAttempt(number, place, self._start_branch))
        for branch in self._branches:
            branch.waits_for_the_end = self._waits_for_the_end(branch)
            if not branch.waits_for_the_end:
                branch.begin(self._assignment_of(branch))

    def _waits_for_the_end(self, branch: BranchAttempt) -> bool:
        """Return whether a branch has nothing to do before all others have pushed all their changes.

        Then only the first branch has something left to do: it saves the result.
        """
        return self._machine.is_done(branch.number) and not self._machine.is_over

    def _prepare(self) -> ShardStoreFacts:
        """Prepare the data that all branches share."""
        assignment = self._assignment.model_copy(update={"checkpoint": None})
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        shard_store = ShardStore.options(scheduling_strategy=here).remote(  # type: ignore[attr-defined]
            assignment.model_dump_json()
        )
        try:
            return prepare(shard_store, self._requests, self._note)
        finally:
            ray.kill(shard_store)

    def _place_with_members(self, number: int, chosen: BranchPlace) -> BranchPlace:
        """Return the machines with members of an earlier attempt, or ``chosen`` if these are all in it."""
        held = set(workers_of(self._id_of(number)).values())
        machines = tuple(machine.id for machine in self._topology.contributors if machine.id in held)
        return chosen if set(chosen.machines).issuperset(machines) else replace(chosen, machines=machines)

    def _recover(self, facts: ShardStoreFacts, places: Sequence[BranchPlace]) -> int:
        """Return the version from which the job continues; write version 0 if the job has no version yet.

        Args:
            facts: the facts that the shard store returned.
            places: machines of the branches.
        """
        recorded = max((record.version for record in self._step_log.merges()), default=0)
        version = self._aggregator.newest_whole(recorded)
        if version is None:
            self._note("the initial weights are written")
            self._aggregator.begin(
                initial_shards(self._assignment.spec, facts),
                self._facts(facts, places),
            )
            version = 0
        if version < recorded:
            self._note(
                f"the weights after round {recorded} are damaged: round {version + 1} is the next one",
                "warning",
            )
            self._step_log.unmerge(version)
            for number in range(self._policy.branches):  # they have the weights that are lost
                self._kill_members(number)
        self._aggregator.forget_after(version)
        self._aggregator.require_fragments()
        return version

    def _facts(self, facts: ShardStoreFacts, places: Sequence[BranchPlace]) -> dict[str, Any]:
        """Return the training state of version 0, which contains what the first branch's plan fixes for all."""
        spec, profile = self._assignment.spec, dissect(facts.blueprint)
        solution = solve(spec, island_topology(self._topology, places[0]), profile, 0, {})
        found = beginning_facts(spec, facts, solution.plan)
        is_measured = isinstance(self._policy, GossipSpec) and self._policy.graph == "measured"
        return found | {EDGES: neighbours(self._topology, places)} if is_measured else found

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
                "spec": _spec_of(assignment.spec, number),
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

        To a parameter server, a branch may push a change to weights that are not the newest. A branch that trains on
        while its round is merged may not have the update yet.
        """
        may_be_old = self._policy.merges_apart or self._policy.overlapping > 0
        is_old = may_be_old and self._aggregator.follows(version, newest, number)
        is_known = self._machine.last_round(number) <= version + 1  # else it would train merged rounds again
        return version == newest or (is_old and version < newest and is_known)

    def _steps(self, number: int) -> int:
        """Return the number of steps of a branch that the merged weights include.

        Branches of local steps continue with the common weights, so a late one skips the steps that it missed.
        """
        steps, is_local = self._assignment.spec.training.steps, isinstance(self._policy, LocalSpec)
        rounds = self._machine.version if is_local else self._machine.clock(number)
        return steps if self._machine.is_over else self._policy.steps_after(rounds, steps)

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self) -> AttemptEnded:
        """Merge contributions until the first branch, which saves the result, has ended."""
        while True:
            self._pass_requests_on()
            while not self._reports.empty():
                self._on_report(self._reports.get())
            calls = {branch.call: branch for branch in self._branches if not branch.has_ended}
            for ref in ray.wait(list(calls), num_returns=len(calls), timeout=_POLL_S)[0]:
                ended = self._take_events(calls[ref])
                if ended is not None:
                    return ended
            self._carry_out(self._machine.handle(TimeRead(time.monotonic())))

    def _pass_requests_on(self) -> None:
        """Pass changes of machines on to the branches; end the attempt if this was requested."""
        if self._requests.cancelled.is_set():
            raise Cancelled
        if self._requests.suspended.is_set():
            self._ask_all("suspend")
            self._await_ends()
            raise suspended(f"in round {self._machine.open_round}")
        offer, leaving = self._requests.offered, self._requests.leaving
        known_offer, known_leaving = self._forwarded
        if offer is not None and offer is not known_offer:
            self._topology = offer.topology
            for branch in self._branches:
                branch.offer(offer.topology)
            if self._relocation is not None:
                self._relocation.answer(offer)
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
        """Ask the branches that are to move to save their state; they end, and begin again on other machines."""
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
            names = listed(sorted(self._name(machine) for machine in branch.place.machines))
            self._note(f"branch {branch.number} continues on {names}")
            self._begin_again(branch)
            return None
        is_attached = error.get("code") in (LinkLost.code, ShardStoreLost.code)
        self._restart(branch, event.reason, moves=not is_attached)
        return None

    def _restart(self, branch: BranchAttempt, why: str, *, moves: bool) -> None:
        """Start a branch again, on other machines if its own may be lost.

        Raises:
            ContributorLost: no machine is left, or the branch was restarted too often.
        """
        if branch.restarts >= _MOST_RESTARTS:
            raise ContributorLost(
                f"branch {branch.number} was started {_MOST_RESTARTS + 1} times without a contribution: {why}",
                hint="look at the job's log for the machines that were lost",
            )
        branch.restarts += 1
        if self._waits_for_the_end(branch):
            branch.has_ended = branch.waits_for_the_end = True
            return
        if moves:
            left = {machine.id for machine in self._topology.contributors} - self._requests.leaving
            branch.place = other_place(branch, self._branches, left, why)
        assignment = self._begin_again(branch)
        names = listed(sorted(self._name(machine) for machine in branch.place.machines))
        loss = f"; {lost_state(assignment)}" if moves else ""
        self._note(f"branch {branch.number} is started again on {names}{loss}: {why}", "warning")

    def _begin_again(self, branch: BranchAttempt) -> Assignment:
        """Start a coordinator for a branch that had one, and return its assignment."""
        assignment = self._assignment_of(branch)
        assert assignment.branch is not None
        if assignment.branch.step is not None:  # not from the branch's own checkpoint
            for run in self._machine.withdraw(branch.number):
                self._drop(run)
        branch.begin(assignment)
        return assignment

    def _drop(self, run: BranchRun) -> None:
        """Remove the files of a contribution that is not used."""
        if run in self._contributions:
            report, _ = self._contributions.pop(run)
            shutil.rmtree(report.folder, ignore_errors=True)

    # -- merges ------------------------------------------------------------------------------------------------------

    def _on_report(self, report: BranchReport) -> None:
        branch = next((each for each in self._branches if each.number == report.branch), None)
        if branch is None or report.start != branch.starts or report.round > self._machine.open_round:
            return  # of a coordinator that was replaced, or of no branch
        branch.base = branch.oldest = report.round - 1
        branch.waiting = report
        if not self._machine.has(report.run):
            try:
                digest = self._aggregator.check(report.run, report.folder)
            except VerificationFailed as failure:
                self._run_again(branch, report, failure)
                return
            branch.restarts = 0
            now_s = time.monotonic()
            self._contributions[report.run] = report, now_s
            contribution = Contribution(report.run, float(report.samples), digest)
            self._carry_out(self._machine.handle(TimeRead(now_s)))  # the grace period begins now
            self._carry_out(self._machine.handle(Contributed(contribution)))
        self._answer(branch)

    def _run_again(self, branch: BranchAttempt, report: BranchReport, failure: VerificationFailed) -> None:
        """Let new members of a branch, if possible on other machines, begin its round again."""
        shutil.rmtree(report.folder, ignore_errors=True)
        branch.kill()
        self._kill_members(branch.number)
        self._restart(branch, failure.message, moves=True)

    def _carry_out(self, effects: Iterable[RoundEffect]) -> None:
        for effect in effects:
            if isinstance(effect, RecordMerge):
                self._merge(effect.record)
            else:
                self._drop(effect.run)
                self._note(
                    f"the contribution of branch {effect.run.branch} to round {effect.run.round} is not used: "
                    f"{effect.reason}",
                    "warning",
                )

    def _merge(self, record: MergeRecord) -> None:
        """Compute a merge and store its record; then all branches that wait get the update."""
        began_s = time.monotonic()
        found = {run: self._contributions[run] for run in record.runs}
        missing = () if self._policy.merges_apart else self._machine.missing(record.runs)
        version = record.version
        rounds = self._machine.rounds_with(record)
        step = self._policy.steps_after(rounds, self._assignment.spec.training.steps)
        self._state |= {"step": step, "version": version, "validations": self._events.validations}
        folders = {run: report.folder for run, (report, _) in found.items()}
        distance = self._aggregator.merge(record, folders, self._state)
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
        size_bytes = sum(file.stat().st_size for file in folder.iterdir())
        self._report(CheckpointSaved(step=step, path=folder, size_bytes=size_bytes))
        for run, (report, _) in found.items():
            del self._contributions[run]
            shutil.rmtree(report.folder, ignore_errors=True)
        self._carry_out(self._machine.handle(MergeRecorded(record)))
        first = self._branches[0]
        if self._machine.is_over and first.has_ended:
            first.begin(self._assignment_of(first))
        for branch in self._branches:
            self._answer(branch)
        if not self._machine.is_over:
            self._move()
        newest, oldest = self._machine.version, min(branch.oldest for branch in self._branches)
        loading = [branch.base for branch in self._branches if not branch.has_begun]
        if self._policy.keeps_own_weights:
            loading.append(
                self._branches[0].sent
            )  # the first branch may evaluate the weights after its round
        kept = _MOST_UPDATES * (self._policy.branches if self._policy.merges_apart else 1)
        self._aggregator.prune(newest, max(oldest, newest - kept), loading)

    def _answer(self, branch: BranchAttempt) -> None:
        """Send a branch that waits the updates with which it continues, unless it has to wait for other branches."""
        report = branch.waiting
        if report is None:
            return
        versions = self._machine.updates(report.run)
        if versions is None and self._machine.is_over:
            versions = range(0)
        if versions is None:
            return
        base, number = report.round - 1, branch.number
        updates = tuple(
            BranchUpdate(
                version=version,
                before=base if version == versions.start else version - 1,
                folder=self._aggregator.update_folder(version, number),
            )
            for version in versions
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

    def _name(self, machine: str) -> str:
        known = {each.id: each.name for each in self._topology.contributors}
        return known.get(machine, machine)

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

    def _await_ends(self) -> None:
        """Wait until the coordinators of all branches have ended; kill those that do not end in time."""
        deadline_s = time.monotonic() + _END_S
        while time.monotonic() < deadline_s:
            calls = {branch.call: branch for branch in self._branches if not branch.has_ended}
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
        for branch in self._branches:
            branch.kill()

    def _end_branches(self, *, is_over: bool) -> None:
        """End the coordinators of all branches.

        Args:
            is_over: whether to end the members as well. If not, another attempt continues with them.
        """
        if is_over:
            self._ask_all("cancel")
            self._await_ends()
        for branch in self._branches:
            branch.kill()


def _spec_of(spec: TrainJob, number: int) -> TrainJob:
    """Return the job of a branch: only the first branch evaluates the model, which is the same in all branches."""
    if number == 0:
        return spec
    training = spec.training.model_copy(
        update={"validate_every": None, "early_stopping": None, "target": None, "samples": None}
    )
    return spec.model_copy(update={"training": training})
