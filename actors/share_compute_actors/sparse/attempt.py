"""One attempt at a job with a sparse model: prepare the rows, train, measure, save the result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ray.exceptions import RayError

from share_compute.errors import ContributorLost, Unavailable, UserError
from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    AttemptEvent,
    CheckpointSaved,
    Note,
    RangesPlaced,
    SparseAssignment,
    Started,
    StepCommitted,
    TargetReached,
    Validated,
)
from share_compute.sparse.blocks import Block
from share_compute.sparse.cocoa import DualProblem
from share_compute.sparse.jobs import (
    chosen_machines,
    dual_problem_of,
    placement_sentence,
    require_memory,
    settings_of,
    target_kind,
    worker_memory_bytes,
)
from share_compute.sparse.measuring.evaluation import SparseEvaluation, dual_evaluated, evaluated
from share_compute.sparse.preparation import (
    DealtRows,
    Targets,
    deal_out,
    measured_blocks,
    read_rows,
)
from share_compute.sparse.progress import RunProgress, WorkerProgress
from share_compute.sparse.results import save_linear, save_rows
from share_compute.topology import Contributor
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.sparse.checkpoints import (
    CheckpointFacts,
    CheckpointOptions,
    DualFacts,
    SavedCheckpoint,
    data_digest,
    dual_state,
    newest_checkpoint,
    newest_dual,
    range_name,
    range_parts,
    save_dual,
    write_checkpoint,
)
from share_compute_actors.sparse.dual import DualRun, lost
from share_compute_actors.sparse.hogwild import HogwildRun
from share_compute_actors.sparse.nodes import LivingNodes
from share_compute_actors.sparse.run import RunOptions, SparseRun
from share_compute_actors.sparse.source import VALIDATION
from share_compute_actors.sparse.suspension import Suspension

T = TypeVar("T")
ARTIFACT = "model"
_REPORT_S = 0.5
"""Shortest time between two reports of steps."""


class _IntervalSaving:
    """Writes the checkpoints of a run without servers.

    Args:
        options: where and how often checkpoints are written; None for no checkpoints.
        data: digest of the prepared rows.
        report: function that receives the event of each checkpoint.
    """

    def __init__(
        self, options: CheckpointOptions | None, data: str, report: Callable[[AttemptEvent], None]
    ) -> None:
        self.options, self.data, self._report = options, data, report
        self._saved_at = time.monotonic()
        self.step = 0
        """Step of the newest checkpoint; 0 if there is none."""

    def go_on(
        self, step: int, save: Callable[[CheckpointOptions], SavedCheckpoint], *, now: bool = False
    ) -> None:
        """Write the checkpoint of a step if the interval has passed, or if ``now`` is true."""
        if self.options is None or step == self.step:
            return
        if not now and time.monotonic() - self._saved_at < self.options.every_s:
            return
        saved = save(self.options)
        self._report(CheckpointSaved(step=saved.step, path=saved.folder, size_bytes=saved.size_bytes))
        self._saved_at, self.step = time.monotonic(), saved.step


def _digest(files: Sequence[Sequence[str]]) -> str:
    return data_digest(Path(file) for part in files for file in part)


class SparseAttempt:
    """One attempt at a job with a sparse model.

    Args:
        assignment: the job, and the machines that it may use.
        report: function that receives each event.
        requests: requests of the control plane.
        source: actor from which workers fetch prepared rows; see `fetched`.
    """

    def __init__(
        self,
        assignment: SparseAssignment,
        report: Callable[[AttemptEvent], None],
        requests: ControlRequests,
        source: Any,
    ) -> None:
        self._assignment, self._spec = assignment, assignment.spec
        self._report, self._requests, self._source = report, requests, source
        self._machines: list[Contributor] = []
        self._validation: list[Block] = []
        self._validation_files: tuple[str, ...] = ()
        """Prepared files that workers measure."""
        self._step_at = self._began_at = 0.0
        self._reached: tuple[int, float] | None = None
        """Step and value of the metric with which the target was reached."""
        self._suspension = Suspension()
        """Deadline of the checkpoint after a pass of Hogwild."""
        self._require: Callable[[Sequence[Contributor]], None] = lambda _: None
        """Raises `UserError` if machines lack memory for the job."""
        self._checked: list[Contributor] = []
        """Machines for which `_require` was called last."""
        self._is_memory_lacking = False
        self._living = LivingNodes(())
        self._leaving: frozenset[str] = frozenset()
        """Machines that had to leave when the attempt looked last."""

    def make(self) -> AttemptEnded:
        """Run the attempt, and return the event that reports its success.

        Raises:
            Cancelled: the submitter cancelled the job.
            ShareComputeError: the attempt failed.
        """
        self._machines = chosen_machines(self._spec, self._assignment.topology.contributors)
        self._living = LivingNodes(self._nodes)
        self._place()
        prepared = self._prepared()
        self._step_at = self._began_at = time.monotonic()
        try:
            if self._spec.is_dual:
                reason = self._solve(prepared)
            elif self._spec.training.hogwild_threads is not None:
                reason = self._run_threads(prepared, self._spec.training.hogwild_threads)
            else:
                reason = self._train(prepared)
        except RayError as failure:
            raise lost(failure) from failure
        shutil.rmtree(self._data_folder, ignore_errors=True)
        return AttemptEnded(outcome="succeeded", reason=f"{self._target_sentence()}{reason}")

    # -- machines ------------------------------------------------------------------------------------------------------

    @property
    def _nodes(self) -> list[str]:
        return [machine.node_id for machine in self._machines]

    def _place(self) -> None:
        machines = tuple(machine.id for machine in self._machines)
        self._report(RangesPlaced(machines=machines, sentence=placement_sentence(self._spec, self._machines)))

    # -- data ----------------------------------------------------------------------------------------------------------

    @property
    def _data_folder(self) -> Path:
        return self._assignment.folder / "data"

    def _prepared(self) -> DealtRows:
        """Read all files, and write the rows of each worker to separate files."""
        data, kind = self._spec.data, target_kind(self._spec)
        workers = 1 if self._spec.training.hogwild_threads is not None else self._spec.training.workers
        try:
            shutil.rmtree(self._data_folder, ignore_errors=True)
            self._data_folder.mkdir(parents=True)
            rows = read_rows(data.files, data.format, data.columns, Targets(kind), self._stop_if_asked)
            prepared = deal_out(rows, workers, self._data_folder)
        except OSError as failure:
            raise Unavailable(
                f"the prepared rows cannot be written: {failure.strerror or failure}",
                hint=f"free space, then share-compute resume {self._assignment.job_id}",
            ) from failure
        measured = self._read_validation()
        also = f", and {measured} rows for validation" if measured else ""
        self._report(Note(message=f"read {prepared.num_rows} rows for {_count(workers, 'worker')}{also}"))
        return prepared

    def _read_validation(self) -> int:
        """Read the rows for measurements of the model, and return their number."""
        data = self._spec.data
        if not data.validation_files:
            return 0
        targets = Targets(target_kind(self._spec))
        rows = read_rows(data.validation_files, data.format, data.columns, targets, self._stop_if_asked)
        if self._spec.is_dual or self._spec.training.hogwild_threads is not None:
            self._validation = measured_blocks(rows, with_bias=data.format == "libsvm")
            return sum(block.rows for block in self._validation)
        folder = self._data_folder / VALIDATION
        folder.mkdir()
        dealt = deal_out(rows, 1, folder)
        self._validation_files = tuple(str(folder / name) for name in dealt.files[0])
        return dealt.num_rows

    def _files(self, prepared: DealtRows) -> list[list[str]]:
        return [[str(self._data_folder / name) for name in names] for names in prepared.files]

    # -- parameter server ----------------------------------------------------------------------------------------------

    def _train(self, prepared: DealtRows) -> str:
        settings = settings_of(self._spec, prepared)
        lasts = [
            prepared.minibatches(worker, settings.batch_size) * settings.passes
            for worker in range(settings.workers)
        ]
        nodes = self._nodes
        options = RunOptions(
            self._checkpoints(),
            self._report_of_run,
            memory_bytes=worker_memory_bytes(settings, self._machines, prepared.keys),
            validation=self._validation_files,
            check=self._stop_if_asked,
        )
        run = SparseRun(settings, self._files(prepared), "libsvm", nodes, nodes, self._source, options)
        step = run.saved.step if run.saved is not None else 0
        progress = RunProgress(lasts, step)
        self._report(Started(first_step=step + 1, total_steps=progress.total_steps))
        for note in run.notes:
            self._report(Note(message=note))
        polled, returns = time.monotonic(), 0

        def require(machines: Sequence[Contributor]) -> None:
            memory_bytes = worker_memory_bytes(settings, machines, prepared.keys)
            # Workers that start later get this limit.
            run.options = replace(run.options, memory_bytes=memory_bytes)

        self._require = require

        def watch() -> None:
            nonlocal polled, returns
            self._stop_if_cancelled()
            if run.returns > returns and run.saved is not None:
                returns = run.returns
                self._reached = None  # the rows are older than the rows that reached the target
                self._report(
                    Note(
                        level="warning",
                        message=f"all copies of a range were lost; training continues from step {run.saved.step}",
                    )
                )
            if self._reached is not None:
                run.end()
            else:
                self._leave_or_end(run)
            if time.monotonic() - polled >= _REPORT_S:
                self._poll(run, progress)
                polled = time.monotonic()

        with closing(run):
            reports = run.train(watch)
            for number, report in enumerate(reports):
                progress.seen(number, WorkerProgress(report.clock, report.examples, report.loss))
            self._report_step(progress)
            moved = sum(report.sent_bytes + report.received_bytes for report in reports)
            self._report_target(moved)
            count = self._save(lambda file: save_rows(file, settings, run.pieces()))
        is_whole = all(report.is_done for report in reports)
        passes = _count(settings.passes, "pass", "passes") if is_whole else "less than all passes"
        return f"trained {count} rows of weights in {passes}; workers moved {moved} bytes"

    def _checkpoints(self) -> CheckpointOptions | None:
        every_s = self._assignment.checkpoint_every_s
        return (
            None if every_s is None else CheckpointOptions(self._assignment.folder / "checkpoints", every_s)
        )

    def _poll(self, run: SparseRun, progress: RunProgress) -> None:
        """Report the steps that workers have made."""
        for number, report in run.reports(timeout_s=5).items():
            progress.seen(number, WorkerProgress(report.clock, report.examples, report.loss))
        self._report_step(progress)

    def _report_step(self, progress: RunProgress) -> None:
        """Report the progress since the last report, if there is any."""
        found = progress.next_step()
        if found is not None:
            self._step(found.step, found.loss, found.examples)

    def _leave(self, run: SparseRun | DualRun) -> None:
        """Stop using machines that must leave, except for the last one."""
        for machine in list(self._machines):
            if machine.id in self._requests.leaving and run.leave(machine.node_id):
                self._machines.remove(machine)
                self._place()

    def _leave_or_end(self, run: SparseRun) -> None:
        """Suspend a run that has to end, with a checkpoint; otherwise stop using machines that must leave."""
        has_to_end = self._has_to_end()
        run.suspension.want(is_wanted=has_to_end)
        if not has_to_end:  # otherwise workers would move to the last machine, and read their rows in vain
            self._leave(run)

    def _staying(self) -> list[Contributor]:
        """Return the machines of the job that are in the cluster and need not leave."""
        leaving = self._requests.leaving
        nodes = self._living.now(afresh=leaving != self._leaving)
        self._leaving = leaving
        return [
            machine for machine in self._machines if machine.node_id in nodes and machine.id not in leaving
        ]

    def _lacks_memory(self, machines: list[Contributor]) -> bool:
        """Return whether these machines lack memory for the job."""
        if machines != self._checked:
            self._checked, self._is_memory_lacking = machines, False
            try:
                self._require(machines)
            except UserError as lack:
                self._is_memory_lacking = True
                self._report(Note(level="warning", message=f"the job cannot go on: {lack.message}"))
        return self._is_memory_lacking

    # -- CoCoA ---------------------------------------------------------------------------------------------------------

    def _solve(self, prepared: DealtRows) -> str:
        problem, training = dual_problem_of(self._spec, prepared), self._spec.training
        self._require = partial(require_memory, self._spec, prepared=prepared)
        self._require(self._machines)
        files = self._files(prepared)
        saving = _IntervalSaving(self._checkpoints(), _digest(files), self._report)
        saved = self._restored(
            saving, lambda each: newest_dual(each.folder, problem, training.seed, saving.data)
        )
        run = DualRun(problem, files, self._nodes, self._source, training.seed, self._stop_if_asked)
        gap, rounds = float("inf"), 0

        def save(step: int) -> Callable[[CheckpointOptions], SavedCheckpoint]:
            facts = DualFacts(problem, training.seed, step, saving.data)
            return partial(save_dual, facts=facts, weights=run.weights, duals=run.duals)

        def watch() -> None:
            self._stop_if_cancelled()
            if self._has_to_end():  # a round may take long, but the state before the round is known
                self._end(saving, run.finished, save(run.finished))
            self._leave(run)

        with closing(run):
            if saved is not None:
                run.restore(saved.step, *dual_state(saved, training.workers))
            self._report(Started(first_step=run.first + 1, total_steps=training.passes))
            for state in run.rounds(training.passes, watch):
                gap = state.gap
                # A restored state is reported again, because the earlier attempt may have ended before its report.
                self._step(state.rounds, state.loss, prepared.num_rows)
                self._validate_dual(state.rounds, problem, run)
                self._compare(state.rounds, "duality_gap", state.gap)
                rounds = state.rounds
                if self._reached is not None:
                    self._report_target(run.moved_bytes)
                    break
                saving.go_on(state.rounds, save(state.rounds))
        proof = {"model": self._spec.model.name, "l2": problem.l2, "gap": gap}
        places, weights = run.places, run.weights
        self._save(lambda file: save_linear(file, proof, places, weights))
        return f"solved in {_count(rounds, 'round')}; the objective is at most {gap:.3g} above its optimum"

    def _validate_dual(self, step: int, problem: DualProblem, run: DualRun) -> None:
        if self._validation:
            found = dual_evaluated(problem.loss, run.places, run.weights, self._validation)
            self._measured(step, found)

    # -- Hogwild -------------------------------------------------------------------------------------------------------

    def _run_threads(self, prepared: DealtRows, threads: int) -> str:
        settings = settings_of(self._spec, prepared)
        require_memory(self._spec, self._machines, prepared)
        [files] = self._files(prepared)
        saving = _IntervalSaving(self._checkpoints(), _digest([files]), self._report)
        saved = self._restored(saving, lambda each: newest_checkpoint(each.folder, settings, saving.data))
        first = saved.step if saved is not None else 0
        self._report(Started(first_step=first + 1, total_steps=settings.passes))
        run = HogwildRun(
            settings,
            files,
            self._nodes[0],
            self._source,
            threads,
            self._stop_if_asked,
            [] if saved is None else range_parts(saved, 0),
        )
        with closing(run):
            for number in range(first, settings.passes):
                answer = run.train(number, self._stop_if_late)
                self._step(number + 1, answer.loss, answer.rows)
                if self._validation:
                    self._measured(
                        number + 1, evaluated(settings.build_model(), run.weights(), self._validation)
                    )
                if self._reached is not None:
                    self._report_target(0)
                    break
                facts = CheckpointFacts(settings, number + 1, {0: number + 1}, saving.data)
                save = partial(write_checkpoint, facts=facts, files={range_name(0): run.snapshot()})
                if number + 1 < settings.passes and self._has_to_end():
                    self._end(saving, number + 1, save)
                saving.go_on(number + 1, save)
            rows = run.weights()
        self._save(lambda file: save_rows(file, settings, [rows]))
        return f"trained {len(rows.places)} rows of weights with {_count(threads, 'thread')}"

    # -- checkpoints without servers -----------------------------------------------------------------------------------

    def _restored(
        self,
        saving: _IntervalSaving,
        find: Callable[[CheckpointOptions], tuple[SavedCheckpoint | None, tuple[str, ...]]],
    ) -> SavedCheckpoint | None:
        """Return the newest checkpoint, if there is one, and report damaged ones."""
        if saving.options is None:
            return None
        saved, notes = find(saving.options)
        for note in notes:
            self._report(Note(message=note))
        saving.step = saved.step if saved is not None else 0
        return saved

    def _end(
        self, saving: _IntervalSaving, step: int, save: Callable[[CheckpointOptions], SavedCheckpoint]
    ) -> NoReturn:
        """Write the checkpoint of a step, unless it is the newest one, and end the attempt.

        Raises:
            ContributorLost: the attempt ends, and another one continues.
            Unavailable: the checkpoint cannot be written.
        """
        saving.go_on(step, save, now=True)
        after = f"after step {step}" if step and saving.options is not None else "without a checkpoint"
        raise ContributorLost(f"suspended {after}", hint="it continues by itself")

    # -- reports -------------------------------------------------------------------------------------------------------

    def _step(self, step: int, loss: float, examples: int) -> None:
        now = time.monotonic()
        seconds = max(now - self._step_at, 1e-6)
        self._step_at = now
        self._report(
            StepCommitted(
                step=step,
                loss=loss,
                learning_rate=self._spec.training.learning_rate,
                gradient_norm=None,
                samples=examples,
                tokens=examples,
                seconds=seconds,
                tokens_per_s=examples / seconds,
            )
        )

    def _measured(self, step: int, found: SparseEvaluation) -> None:
        self._report_of_run(
            Validated(
                split="validation",
                step=step,
                loss=found.loss,
                accuracy=found.accuracy,
                auroc=found.auroc,
                rmse=found.rmse,
                mae=found.mae,
                perplexity=found.perplexity,
            )
        )

    # -- target --------------------------------------------------------------------------------------------------------

    def _report_of_run(self, event: AttemptEvent) -> None:
        """Report an event; if it is a validation, compare its metrics with the target."""
        self._report(event)
        target = self._spec.training.target
        if isinstance(event, Validated) and target is not None and target.metric != "duality_gap":
            name = "loss" if target.metric == "validation_loss" else target.metric
            self._compare(event.step, target.metric, getattr(event, name))

    def _compare(self, step: int, metric: str, value: float | None) -> None:
        """Keep the first value that reaches the target."""
        target = self._spec.training.target
        is_target = target is not None and target.metric == metric and target.is_met(value)
        if is_target and value is not None and self._reached is None:
            self._reached = (step, value)

    def _report_target(self, moved_bytes: int) -> None:
        """Report the time and the bytes that it took to reach the target, if it was reached."""
        target = self._spec.training.target
        if target is not None and self._reached is not None:
            step, value = self._reached
            self._report(
                TargetReached(
                    step=step,
                    metric=target.metric,
                    value=value,
                    seconds=time.monotonic() - self._began_at,
                    sent_bytes=moved_bytes,
                )
            )

    def _target_sentence(self) -> str:
        target = self._spec.training.target
        if target is None or self._reached is None:
            return ""
        step, value = self._reached
        return f"{target.metric} {value:.4g} reached the target {target.value:g} after step {step}; "

    def _save(self, write: Callable[[Path], T]) -> T:
        """Write the result, and return the return value of ``write``."""
        folder = self._assignment.folder / "artifacts"
        file = folder / f"{ARTIFACT}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = write(file)
            size_bytes = file.stat().st_size
        except OSError as failure:
            raise Unavailable(
                f"the result cannot be written: {failure.strerror or failure}",
                hint=f"free space, then share-compute resume {self._assignment.job_id}",
            ) from failure
        self._report(ArtifactSaved(name=ARTIFACT, path=file, size_bytes=size_bytes))
        return found

    def _stop_if_cancelled(self) -> None:
        if self._requests.cancelled.is_set():
            raise Cancelled

    def _stop_if_late(self) -> None:
        """End the attempt if it is cancelled, or if it could not save a checkpoint in time before its end."""
        self._stop_if_cancelled()
        self._suspension.want(is_wanted=self._has_to_end())
        if self._suspension.is_late:
            raise ContributorLost("suspended before the next checkpoint", hint="it continues by itself")

    def _has_to_end(self) -> bool:
        """Return whether the attempt is suspended, or the remaining machines are too few or lack memory."""
        staying = self._staying()
        return self._requests.suspended.is_set() or not staying or self._lacks_memory(staying)

    def _stop_if_asked(self) -> None:
        self._stop_if_cancelled()
        if self._requests.suspended.is_set():
            raise ContributorLost("suspended", hint="it continues by itself")


def _count(number: int, word: str, words: str | None = None) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {words or word + 's'}"
