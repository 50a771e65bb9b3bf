"""The coordinator: one actor on the head that makes one attempt at a training job.

Main path: `Coordinator.run` prepares the data, plans, starts one member on each contributor of the plan, then asks
them for step after step. It never carries tensors; what happens is told as events, which the control plane stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.jobs.events import (
    ArtifactSaved,
    Assignment,
    AttemptEnded,
    AttemptEvent,
    CheckpointSaved,
    Note,
    Planned,
    Started,
    attempt_events,
)
from share_compute.models.blueprint import dissect
from share_compute.models.weights import prune_folders
from share_compute.planning.plan import make_plan
from share_compute_actors.crew import Cancelled, Crew
from share_compute_actors.library import Library, LibraryFacts
from share_compute_actors.training import TrainingLoop

_CHECKPOINTS_KEPT = 2


@ray.remote(num_cpus=0, concurrency_groups={"run": 1, "control": 4})
class Coordinator:
    """Makes one attempt at one job.

    Args:
        assignment: an `Assignment` as JSON.
    """

    def __init__(self, assignment: str) -> None:
        self._text = assignment
        self._assignment = Assignment.model_validate_json(assignment)
        self._events: list[AttemptEvent] = []
        self._news = threading.Condition()
        self._cancelled = threading.Event()

    @ray.method(concurrency_group="run")
    def run(self) -> None:
        """Make the attempt; the last event says how it ended."""
        try:
            self._attempt()
        except Cancelled:
            self._tell(AttemptEnded(outcome="cancelled", reason="cancelled on request"))
        except ShareComputeError as failure:
            self._tell(
                AttemptEnded(
                    outcome="failed", reason=failure.message, error={"code": failure.code, **failure.facts()}
                )
            )
        except Exception as failure:  # noqa: BLE001 - an attempt must always say how it ended
            self._tell(
                AttemptEnded(
                    outcome="failed",
                    reason=f"{type(failure).__name__}: {failure}",
                    error={"code": "internal", "mend": "report this together with the job's log"},
                )
            )

    @ray.method(concurrency_group="control")
    def events(self, after: int, timeout_s: float) -> str:
        """Return the events that followed the first ``after`` ones, as JSON; waits for the next one if there is none."""
        with self._news:
            self._news.wait_for(lambda: len(self._events) > after, timeout_s)
            return attempt_events.dump_json(self._events[after:]).decode()

    @ray.method(concurrency_group="control")
    def cancel(self) -> None:
        """Ask the attempt to end at the next step."""
        self._cancelled.set()

    # -- the attempt ---------------------------------------------------------------------------------------------

    def _attempt(self) -> None:
        library = Library.options(scheduling_strategy=_here()).remote(self._text)
        crew: Crew | None = None
        try:
            facts = self._prepare(library)
            anatomy = dissect(facts.blueprint)
            plan = make_plan(self._assignment.spec, self._assignment.topology, anatomy, self._assignment.epoch)
            self._tell(Planned(plan=plan))
            crew = Crew(self._assignment, plan, facts, library, self._cancelled, anatomy.tied_name)
            crew.assemble(self._note)
            total = self._assignment.spec.training.steps
            self._tell(Started(first_step=facts.first_step, total_steps=total))
            loop = TrainingLoop(self._assignment.spec, plan, facts, crew, self._tell)
            loop.run(lambda step: self._checkpoint(library, crew, facts, step))
            if total >= facts.first_step:
                self._save_result(library, crew, facts, total)
            self._tell(AttemptEnded(outcome="succeeded", reason=f"{total} steps done"))
        finally:
            if crew is not None:
                crew.dismiss()
            ray.kill(library)

    def _prepare(self, library: Any) -> LibraryFacts:
        asked = library.prepare.remote()
        told = ""
        while not ray.wait([asked], timeout=1.0)[0]:
            if self._cancelled.is_set():
                raise Cancelled
            what, _ = ray.get(library.progress.options(concurrency_group="control").remote())
            if what != told:
                told = what
                self._note(what)
        facts = _translate(lambda: ray.get(asked))
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
        state = {"step": step, "job": self._assignment.job_id, "seed": self._assignment.spec.training.seed}
        _translate(lambda: ray.get(library.open.remote(folder)))
        try:
            crew.ask_first("save", folder, with_optimizer)
            size: int = _translate(lambda: ray.get(library.finish.remote(folder, state, facts.blueprint.config)))
        except ShareComputeError:
            ray.get(library.discard.remote(folder))
            raise
        return size

    def _tell(self, event: AttemptEvent) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()

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
        raise Unavailable(
            "the library process on the server died", mend="look for lack of memory on the server, then resume the job"
        ) from failure
