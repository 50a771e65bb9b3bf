"""One attempt at a training job: prepare the data, plan, start the members, train, save the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import LibraryLost, LinkLost, StaleEpoch
from share_compute.jobs.events import (
    Assignment,
    AttemptEnded,
    AttemptEvent,
    LinkCut,
    Note,
    Planned,
    Reformed,
    Started,
)
from share_compute.models.factory import dissect
from share_compute.planning.planner import Solution, solve
from share_compute.planning.strategies import with_nominal_speeds
from share_compute.planning.timings import Timings, holding
from share_compute.protocol.coordinator import Plan
from share_compute.protocol.messages import Form
from share_compute.protocol.roster import Roster, Worker
from share_compute.quantities import listed
from share_compute.specification import TrainJob
from share_compute.topology import Topology
from share_compute_actors.coordinator.balancing import Balancer
from share_compute_actors.coordinator.changes import Changes
from share_compute_actors.coordinator.conductor import Conductor, Heard, Listener
from share_compute_actors.coordinator.coordinator import Cancelled, Wishes
from share_compute_actors.coordinator.crew import Crew, MembersLost
from share_compute_actors.coordinator.cuts import LinksCut
from share_compute_actors.coordinator.forming import Former
from share_compute_actors.coordinator.keeping import Keeper, suspended
from share_compute_actors.coordinator.library import (
    FACTS,
    PROGRESS,
    Library,
    LibraryFacts,
    TrainingState,
)
from share_compute_actors.coordinator.moving import Mover
from share_compute_actors.coordinator.reality import Reality
from share_compute_actors.coordinator.record import CrewFacts, StepRecord
from share_compute_actors.coordinator.rosters import machines_lost
from share_compute_actors.coordinator.takeover import Start, find_takeover, solution_of, state_of
from share_compute_actors.coordinator.training import TrainingLoop
from share_compute_actors.member.rows import ask_library
from share_compute_actors.messages import StepFigures
from share_compute_actors.wire import NOTHING


class TrainingAttempt:
    """One attempt at a training job.

    Args:
        assignment: the job, and the machines that it may use.
        tell: receives events.
        wishes: control requests of the control plane.
        inbox: messages of members.
    """

    def __init__(
        self,
        assignment: Assignment,
        tell: Callable[[AttemptEvent], None],
        wishes: Wishes,
        inbox: SimpleQueue[Heard],
    ) -> None:
        self._assignment = assignment
        self._tell = tell
        self._wishes = wishes
        self._inbox = inbox

    def make(self) -> AttemptEnded:
        """Prepare, plan, train and save; return the event that reports the attempt's success.

        Raises:
            Cancelled: the submitter cancelled the job.
            ShareComputeError: the attempt failed.
        """
        with closing(StepRecord(self._assignment.folder, self._assignment.attempt)) as record:
            record.claim()
            library = Library.options(  # type: ignore[attr-defined]
                scheduling_strategy=_here()
            ).remote(self._assignment.model_dump_json())
            try:
                return self._make(record, library)
            finally:
                ray.kill(library)

    def _make(self, record: StepRecord, library: Any) -> AttemptEnded:
        crew: Crew | None = None
        is_over = True
        try:
            facts = self._prepare(library)
            start = self._start(record, facts)
            spec = self._assignment.spec.with_microbatches(start.solution.plan.microbatches)
            ask_library(NOTHING, library.cut.remote(list(start.runs)))
            assignment = self._assignment.model_copy(update={"spec": spec})
            tied = start.solution.cost.profile.tied_name
            me = ray.get_runtime_context().current_actor
            crew = Crew(assignment, facts, library, me, self._wishes.cancelled, start.runs, tied, self._note)
            if start.takeover is not None:
                crew.attach(start.takeover.actors)
            else:
                self._tell(Planned(plan=start.solution.plan))
                crew.load(start.solution.plan)
            reason = self._train(assignment, start, facts, library, crew, record)
            return AttemptEnded(outcome="succeeded", reason=reason)
        except MembersLost as loss:
            topology = self._assignment.topology if crew is None else crew.topology
            raise machines_lost(topology, loss.workers) from loss
        except (LibraryLost, LinkLost, StaleEpoch):
            is_over = False  # members are alive: another attempt continues with them, or does so already
            raise
        finally:
            if crew is not None and is_over:
                crew.dismiss()

    def _start(self, record: StepRecord, facts: LibraryFacts) -> Start:
        """Return the start from members of an earlier attempt; without such members, plan from the last checkpoint."""
        topology = _without(self._assignment.topology, record.quarantined())
        takeover = find_takeover(self._assignment.job_id, with_nominal_speeds(topology), record)
        if takeover is None:
            record.rewind(facts.first_step - 1)
            solution = self._plan(facts, topology)
            return Start(solution, facts.runs or max(solution.plan.shares, key=len), facts.state)
        spec = self._assignment.spec.with_microbatches(takeover.facts.plan.microbatches)
        profile, timings = dissect(facts.blueprint), self._timings(spec)
        solution = solution_of(takeover, spec, topology, profile, timings)
        state = state_of(record, facts.state)
        self._note(
            f"continues at step {state.step + 1} with the members of attempt {takeover.facts.attempt}: "
            + listed(sorted(topology[worker].name for worker in takeover.actors))
        )
        return Start(solution, takeover.facts.runs, state, takeover)

    def _train(
        self,
        assignment: Assignment,
        start: Start,
        facts: LibraryFacts,
        library: Any,
        crew: Crew,
        record: StepRecord,
    ) -> str:
        """Train and save the result; return the reason why training ended."""
        spec, total = assignment.spec, assignment.spec.training.steps
        solution, takeover = start.solution, start.takeover
        changes = Changes(
            crew,
            self._wishes,
            self._tell,
            lambda: reality.give_up(),  # noqa: PLW0108 - made below
            can_follow=spec.parallelism.buddies,
            quarantined=record.quarantined(),
        )
        balancer = Balancer()
        reality = Reality(
            assignment, solution, self._tell, changes.propose, lambda: changes.usable, changes.under_way
        )

        def observe(step: int, seconds: float, figures: Mapping[Worker, StepFigures]) -> None:
            reality.observe(step, seconds, figures)
            shares = balancer.observe(step, figures, total - step)
            if shares is not None:
                changes.share(shares)

        def paused_early(state: TrainingState) -> None:
            keeper.checkpoint_if_due(state)
            leaving = changes.leaving
            if leaving and not former.can_do_without(leaving):
                keeper.checkpoint(state, waits=True)
            keeper.release(leaving)

        def form(asked: Plan) -> Form:
            found = former.form(asked)
            record.lay(CrewFacts(found.roster, former.solution.plan, start.runs, assignment.attempt))
            former.adopt()
            return found

        with reality:
            loop = TrainingLoop(
                spec,
                replace(facts, state=start.state),
                crew,
                library,
                self._tell,
                observe,
                paused_early,
                record.validated,
            )
            mover = Mover(crew, facts.first_step)
            former = Former(
                spec,
                solution,
                changes,
                mover,
                record.scales,
                self._note,
                timings=reality.timings,
                roster=takeover.facts.roster if takeover is not None else None,
            )

            def reformed(before: Roster, after: Roster, lost: frozenset[Worker], seconds: float) -> None:
                reality.reform(former.solution, are_lost=bool(lost))
                balancer.reform(after)
                self._tell_reformed(before, after, lost, seconds, former, crew, changes)

            def ticked() -> None:
                keeper.look()
                changes.protection.look(loop.state.step)

            listener = Listener(loop.account, loop.committed, reformed, self._note, self._tell, ticked)
            conductor = Conductor(
                crew, record, form, listener, self._inbox, spec.training, self._wishes, changes
            )
            keeper = Keeper(library, crew, conductor, assignment, self._tell, self._wishes)
            goes_on = start.state.step >= facts.first_step
            with self._saving_when_cut(keeper, loop, facts):
                conductor.assemble()
            balancer.reform(conductor.roster)
            if takeover is not None:
                reality.reform(former.solution, are_lost=True)
                self._tell(Planned(plan=former.solution.plan))
            for step in record.steps(after=assignment.told):
                self._tell(step.event)
            changes.protection.reform(conductor.roster)
            self._tell(Started(first_step=start.state.step + 1, total_steps=total))
            with keeper.salvaging(), self._saving_when_cut(keeper, loop, facts):
                reason = loop.run(
                    conductor, lambda state, waits: keeper.checkpoint(state, waits=waits), goes_on=goes_on
                )
            keeper.result(loop.state)
        for worker, share in loop.busy_fractions().items():
            rest = "other machines and for the server" if len(crew.workers) > 1 else "the server"
            self._note(
                f"{crew.name(worker)} computed {share:.0%} of the time; the rest went into waiting for {rest}"
            )
        return reason

    @contextmanager
    def _saving_when_cut(self, keeper: Keeper, loop: TrainingLoop, facts: LibraryFacts) -> Iterator[None]:
        """Report links that are cut between members, and save a checkpoint for the next attempt."""
        try:
            yield
        except LinksCut as cut:
            for pair in cut.pairs:
                self._tell(LinkCut(machines=pair, sentence=cut.message))
            if loop.state.step >= facts.first_step:
                keeper.checkpoint(loop.state, waits=True)
            raise

    def _tell_reformed(
        self,
        before: Roster,
        after: Roster,
        lost: frozenset[Worker],
        seconds: float,
        former: Former,
        crew: Crew,
        changes: Changes,
    ) -> None:
        """Report an epoch that follows another, with the causes."""
        joined = frozenset(after.workers) - frozenset(before.workers)
        left = frozenset(before.workers) - frozenset(after.workers) - lost
        causes = [
            f"{listed(sorted(map(crew.name, workers)))} {verb}"
            for workers, verb in ((lost, "lost"), (left, "left"), (joined, "joined"))
            if workers
        ]
        if changes.why:
            causes.append(changes.why)
        if not causes:
            retried = "a message was lost; members began the step again"
            causes.append(retried if changes.is_broken else "members were linked anew")
        reformed = Reformed(
            epoch=after.epoch,
            step=after.step,
            plan=former.solution.plan,
            lost=tuple(sorted(lost)),
            joined=tuple(sorted(joined)),
            left=tuple(sorted(left)),
            seconds=seconds,
            recomputed=former.recomputed,
            sentence="; ".join(causes),
        )
        changes.tell_reformed(reformed, after)

    def _plan(self, facts: LibraryFacts, topology: Topology) -> Solution:
        spec = self._assignment.spec
        if facts.microbatches is not None:
            spec = spec.with_microbatches(facts.microbatches)
        timings = self._timings(spec)
        if timings:
            count = sum(map(len, timings.values()))
            self._note(f"planned with {count} measured times of layers, which earlier attempts left")
        profile = dissect(facts.blueprint)
        return solve(spec, topology, profile, self._assignment.epoch, timings)

    def _timings(self, spec: TrainJob) -> Timings:
        """Return the timings of earlier attempts that are still valid; none while the microbatch size is open."""
        if spec.training.microbatches is None:
            return {}
        kept, size = self._assignment.timings, spec.training.microbatch_size
        return holding(kept, self._assignment.topology, size)

    def _prepare(self, library: Any) -> LibraryFacts:
        asked = library.prepare.remote()
        told = ""
        while not ray.wait([asked], timeout=1.0)[0]:
            if self._wishes.cancelled.is_set():
                raise Cancelled
            if self._wishes.suspended.is_set():
                raise suspended("while its data was prepared")
            what, _ = ask_library(PROGRESS, library.progress.remote())
            if what != told:
                told = what
                self._note(what)
        facts = ask_library(FACTS, asked)
        for note in facts.notes:
            self._note(note)
        return facts

    def _note(self, message: str, level: Literal["info", "warning", "error"] = "info") -> None:
        self._tell(Note(message=message, level=level))


def _without(topology: Topology, quarantined: Collection[Worker]) -> Topology:
    """Return the machines that are not quarantined; all machines if every one of them is."""
    rest = tuple(machine for machine in topology.contributors if machine.id not in quarantined)
    return Topology(rest, topology.links) if rest else topology


def _here() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
