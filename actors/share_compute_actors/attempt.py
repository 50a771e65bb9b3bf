"""One attempt at a training job: prepare the data, plan, assemble the crew, train, save the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ShareComputeError
from share_compute.jobs.events import (
    ArtifactSaved,
    Assignment,
    AttemptEnded,
    AttemptEvent,
    CheckpointSaved,
    Note,
    Planned,
    Started,
)
from share_compute.models.blueprint import dissect
from share_compute.models.weights import prune_folders
from share_compute.planning.planner import Solution, solve
from share_compute_actors.coordinator import Cancelled
from share_compute_actors.crew import Crew, library_lost
from share_compute_actors.library import Library, LibraryFacts
from share_compute_actors.reality import Reality
from share_compute_actors.training import TrainingLoop

_CHECKPOINTS_KEPT = 3
"""More than one: the control plane writes down a little later which one is the last."""


class TrainingAttempt:
    """One attempt.

    Args:
        assignment: the job, and the machines it may use.
        tell: takes what happens.
        cancelled: set when the submitter cancels.
    """

    def __init__(
        self, assignment: Assignment, tell: Callable[[AttemptEvent], None], cancelled: threading.Event
    ) -> None:
        self._assignment = assignment
        self._tell = tell
        self._cancelled = cancelled

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
            _translate(lambda: ray.get(library.cut.remote(plan.microbatches)))
            self._tell(Planned(plan=plan))
            assignment = self._assignment.model_copy(update={"spec": spec})
            crew = Crew(assignment, plan, facts, library, self._cancelled, solution.cost.profile.tied_name)
            crew.assemble(self._note)
            total = spec.training.steps
            self._tell(Started(first_step=facts.first_step, total_steps=total))
            with Reality(assignment, solution, self._tell) as reality:
                loop = TrainingLoop(spec, plan, facts, crew, self._tell, reality.observe)
                loop.run(lambda step: self._checkpoint(library, crew, facts, step))
            for me, share in loop.busy_fractions().items():
                rest = "other machines and for the server" if len(crew.names) > 1 else "the server"
                self._note(
                    f"{crew.names[me]} computed {share:.0%} of the time; the rest went into waiting for {rest}"
                )
            self._save_result(library, crew, facts, total)
            return AttemptEnded(outcome="succeeded", reason=f"{total} steps done")
        finally:
            if crew is not None:
                crew.dismiss()
            ray.kill(library)

    def _plan(self, facts: LibraryFacts) -> Solution:
        spec = self._assignment.spec
        if facts.microbatches is not None:
            spec = spec.with_microbatches(facts.microbatches)
        profile = dissect(facts.blueprint)
        return solve(spec, self._assignment.topology, profile, self._assignment.epoch, {})

    def _prepare(self, library: Any) -> LibraryFacts:
        asked = library.prepare.remote()
        told = ""
        while not ray.wait([asked], timeout=1.0)[0]:
            if self._cancelled.is_set():
                raise Cancelled
            what, _ = _translate(lambda: ray.get(library.progress.remote()))
            if what != told:
                told = what
                self._note(what)
        facts: LibraryFacts = _translate(lambda: ray.get(asked))
        for note in facts.notes:
            self._note(note)
        return facts

    def _checkpoint(self, library: Any, crew: Crew, facts: LibraryFacts, step: int) -> None:
        folder = f"checkpoints/step-{step:08}"
        size = self._save(library, crew, facts, folder, step, with_optimizer=True)
        self._tell(CheckpointSaved(step=step, path=self._assignment.folder / folder, size_bytes=size))
        prune_folders(self._assignment.folder / "checkpoints", _CHECKPOINTS_KEPT)

    def _save_result(self, library: Any, crew: Crew, facts: LibraryFacts, step: int) -> None:
        folder = "artifacts/model"
        size = self._save(library, crew, facts, folder, step, with_optimizer=False)
        self._tell(ArtifactSaved(name="model", path=self._assignment.folder / folder, size_bytes=size))

    def _save(
        self, library: Any, crew: Crew, facts: LibraryFacts, folder: str, step: int, *, with_optimizer: bool
    ) -> int:
        _translate(lambda: ray.get(library.open.remote(folder)))
        try:
            crew.ask_first("save", folder, with_optimizer)
            size: int = _translate(
                lambda: ray.get(library.finish.remote(folder, step, facts.blueprint.config))
            )
        except BaseException:
            with suppress(ray.exceptions.RayError):  # what went wrong first is what must be told
                ray.get(library.discard.remote(folder))
            raise
        return size

    def _note(self, message: str, level: Literal["info", "warning", "error"] = "info") -> None:
        self._tell(Note(message=message, level=level))


def _here() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _translate(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns; what the library raises on purpose comes out as it was raised."""
    try:
        return call()
    except ray.exceptions.RayTaskError as failure:
        if isinstance(failure.cause, ShareComputeError):
            raise failure.cause from failure
        raise
    except ray.exceptions.RayActorError as failure:
        raise library_lost() from failure
