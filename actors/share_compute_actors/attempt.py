"""One attempt at a training job: prepare the data, plan, assemble the crew, train, save the result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.jobs.events import (
    ArtifactSaved,
    Assignment,
    AttemptEnded,
    AttemptEvent,
    CheckpointSaved,
    Note,
    Planned,
    Reformed,
    Started,
)
from share_compute.models.blueprint import dissect
from share_compute.models.weights import prune_folders
from share_compute.planning.plan import Plan
from share_compute.planning.planner import Solution, solve
from share_compute.planning.timings import Timings, holding
from share_compute.protocol.roster import Roster, Worker
from share_compute.specification import TrainJob
from share_compute_actors.conductor import Conductor, Heard, Listener
from share_compute_actors.coordinator import Cancelled, Wishes
from share_compute_actors.crew import Crew, MembersLost
from share_compute_actors.library import Library, LibraryFacts, TrainingState
from share_compute_actors.messages import FolderKind
from share_compute_actors.reality import Reality
from share_compute_actors.record import StepRecord
from share_compute_actors.rosters import Former, listed, machines_lost, plan_of
from share_compute_actors.rows import ask_library
from share_compute_actors.training import TrainingLoop

_CHECKPOINTS_KEPT = 3
"""More than one: the control plane writes down a little later which one is the last."""


class TrainingAttempt:
    """One attempt.

    Args:
        assignment: the job, and the machines it may use.
        tell: takes what happens.
        wishes: what the control plane asks.
        inbox: what members say.
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
        """Prepare, plan, train, save; return how it ended.

        Raises:
            Cancelled: the submitter cancelled the job.
            ShareComputeError: why it failed.
        """
        library = Library.options(  # type: ignore[attr-defined]
            scheduling_strategy=_here()
        ).remote(self._assignment.model_dump_json())
        crew: Crew | None = None
        try:
            facts = self._prepare(library)
            solution = self._plan(facts)
            plan = solution.plan
            spec = self._assignment.spec.with_microbatches(plan.microbatches)
            runs = facts.runs or max(plan.shares, key=len)
            ask_library(lambda: ray.get(library.cut.remote(runs)))
            self._tell(Planned(plan=plan))
            assignment = self._assignment.model_copy(update={"spec": spec})
            tied = solution.cost.profile.tied_name if len(plan.pools) > 1 else None
            me = ray.get_runtime_context().current_actor
            crew = Crew(assignment, facts, library, me, self._wishes.cancelled, runs, tied)
            crew.load(plan, self._note)
            reason = self._train(assignment, solution, facts, library, crew)
            return AttemptEnded(outcome="succeeded", reason=reason)
        except MembersLost as loss:
            raise machines_lost(self._assignment.topology, loss.workers) from loss
        finally:
            if crew is not None:
                crew.dismiss()
            ray.kill(library)

    def _train(
        self, assignment: Assignment, solution: Solution, facts: LibraryFacts, library: Any, crew: Crew
    ) -> str:
        """Train, save the result, and return why it ended."""
        spec, total = assignment.spec, assignment.spec.training.steps
        record = StepRecord(assignment.folder)
        record.rewind(facts.first_step - 1)
        with Reality(assignment, solution, self._tell) as reality, closing(record):
            loop = TrainingLoop(spec, facts, crew, library, self._tell, reality.observe)

            former = Former(
                solution.plan, solution.cost, is_tied=crew.is_tied, leaving=lambda: conductor.parting
            )
            listener = Listener(
                loop.committed, self._reformed(solution.plan, former, crew, reality), self._note
            )
            conductor = Conductor(
                crew, record, former.form, listener, self._inbox, spec.training, self._wishes
            )
            conductor.assemble()
            self._tell(Started(first_step=facts.first_step, total_steps=total))
            keeper = Keeper(library, crew, conductor)
            reason = loop.run(conductor, lambda state: self._checkpoint(keeper, state))
            self._save_result(keeper, loop.state)
        for worker, share in loop.busy_fractions().items():
            rest = "other machines and for the server" if len(crew.workers) > 1 else "the server"
            self._note(
                f"{crew.name(worker)} computed {share:.0%} of the time; the rest went into waiting for {rest}"
            )
        return reason

    def _reformed(
        self, plan: Plan, former: Former, crew: Crew, reality: Reality
    ) -> Callable[[Roster, Roster, frozenset[Worker], float], None]:
        """Return what tells of an epoch that follows another."""

        def tell(before: Roster, after: Roster, lost: frozenset[Worker], seconds: float) -> None:
            reality.reform(after)
            left = frozenset(before.workers) - frozenset(after.workers) - lost
            causes = [
                f"{listed(map(crew.name, workers))} {verb}"
                for workers, verb in ((lost, "lost"), (left, "left"))
                if workers
            ]
            sentence = "; ".join(causes) or "a message was lost; members began the step again"
            self._tell(
                Reformed(
                    epoch=after.epoch,
                    step=after.step,
                    plan=plan_of(after, plan),
                    lost=tuple(sorted(lost)),
                    left=tuple(sorted(left)),
                    seconds=seconds,
                    recomputed=former.recomputed,
                    sentence=sentence,
                )
            )

        return tell

    def _plan(self, facts: LibraryFacts) -> Solution:
        spec = self._assignment.spec
        if facts.microbatches is not None:
            spec = spec.with_microbatches(facts.microbatches)
        timings = self._timings(spec)
        if timings:
            count = sum(map(len, timings.values()))
            self._note(f"planned with {count} measured times of layers, which earlier attempts left")
        profile = dissect(facts.blueprint)
        return solve(spec, self._assignment.topology, profile, self._assignment.epoch, timings)

    def _timings(self, spec: TrainJob) -> Timings:
        """Return what earlier attempts timed and still holds; nothing while the size of microbatches is open."""
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
            what, _ = ask_library(lambda: ray.get(library.progress.remote()))
            if what != told:
                told = what
                self._note(what)
        facts: LibraryFacts = ask_library(lambda: ray.get(asked))
        for note in facts.notes:
            self._note(note)
        return facts

    def _checkpoint(self, keeper: Keeper, state: TrainingState) -> None:
        folder = f"checkpoints/step-{state.step:08}"
        size = keeper.save(folder, "checkpoint", state)
        self._tell(CheckpointSaved(step=state.step, path=self._assignment.folder / folder, size_bytes=size))
        prune_folders(self._assignment.folder / "checkpoints", _CHECKPOINTS_KEPT)

    def _save_result(self, keeper: Keeper, state: TrainingState) -> None:
        folder = "artifacts/model"
        size = keeper.save(folder, "artifact", state)
        self._tell(ArtifactSaved(name="model", path=self._assignment.folder / folder, size_bytes=size))

    def _note(self, message: str, level: Literal["info", "warning", "error"] = "info") -> None:
        self._tell(Note(message=message, level=level))


def _here() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


class Keeper:
    """Saves the model of a crew into folders of the library.

    Args:
        library: writes them.
        crew: holds the model.
        conductor: sees to it that no step is computed meanwhile.
    """

    def __init__(self, library: Any, crew: Crew, conductor: Conductor) -> None:
        self._library = library
        self._crew = crew
        self._conductor = conductor

    def save(self, folder: str, kind: FolderKind, state: TrainingState) -> int:
        """Write a folder below the job's own; return its bytes."""
        return self._conductor.at_pause(lambda: self._save(folder, kind, state))

    def _save(self, folder: str, kind: FolderKind, state: TrainingState) -> int:
        ask_library(lambda: ray.get(self._library.open.remote(folder)))
        try:
            self._crew.gather(
                {
                    pool[0]: self._crew.handle(pool[0]).save.remote(folder, place, kind)
                    for place, pool in enumerate(self._conductor.roster.pools)
                }
            )
            size: int = ask_library(lambda: ray.get(self._library.finish.remote(folder, kind, state)))
        except BaseException:
            with suppress(ray.exceptions.RayError):  # what went wrong first is what must be told
                ray.get(self._library.discard.remote(folder))
            raise
        return size
