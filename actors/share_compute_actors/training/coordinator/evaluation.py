"""Evaluates the model between steps: validation, final test, sample texts, search for non-finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from share_compute.data.order import evaluated_range, evaluation_starts
from share_compute.errors import UserError
from share_compute.lifecycle.attempt_events import AttemptEvent, Pictured, Sampled, Validated
from share_compute.models.objective import Objective
from share_compute.protocol.membership import Worker
from share_compute.specification import SamplesSpec, TrainJob
from share_compute.training.finiteness import first_of
from share_compute.training.loss_scale import NotFinite, not_finite
from share_compute.training.metrics import MOST_SCORES, Figures, combined, figures_of
from share_compute.training.pictures import picture_of
from share_compute.training.sampling import continue_greedily
from share_compute_actors.group.answering import ask_shard_store
from share_compute_actors.group.exceptions import MembersLost
from share_compute_actors.messages import EvaluationResult
from share_compute_actors.training.coordinator.conductor import Conductor
from share_compute_actors.training.member.schemas import EVALUATION, FINDING, LOGITS
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.training.shard_store import ShardStoreFacts
from share_compute_actors.wire import NOTHING, TEXT

_MOST_TARGETS = 1 << 20
"""Maximum number of samples in one evaluation call, per member of the last stage; a microbatch may have more."""
_EVALUATED_AT_ONCE = 8
"""Maximum number of microbatches in one evaluation call, per member of the largest stage.

It bounds the data that waits in channels."""


class Evaluation:
    """Evaluates the members' model while no step is computed.

    Args:
        spec: the job, with a fixed number of microbatches.
        facts: the facts that the shard store returned.
        shard_store: the shard store's actor, which has the tokenizer.
        group: the members.
        conductor: runs the evaluations while training is paused.
        report: receives events.
    """

    def __init__(
        self,
        spec: TrainJob,
        facts: ShardStoreFacts,
        shard_store: Any,
        group: TrainingGroup,
        conductor: Conductor,
        report: Callable[[AttemptEvent], None],
    ) -> None:
        self._spec = spec
        self._names = [task.name for task in spec.tasks]
        self._facts = facts
        self._shard_store = shard_store
        self._group = group
        self._conductor = conductor
        self._report = report
        self._shows_merged = False

    def show_merged(self, folder: Path | None) -> None:
        """Evaluate weights other than the trained ones until the next step.

        Args:
            folder: the merged weights of all branches on the server; None for the trained weights.
        """
        self._shows_merged = folder is not None
        if folder is not None:
            ask_shard_store(NOTHING, self._shard_store.use_update.remote(str(folder)))

    def _load_merged(self, step: int) -> None:
        """Make all members load the merged weights, if these are evaluated; members that have them do nothing."""
        if self._shows_merged:
            workers = self._conductor.membership.everybody
            calls = {worker: self._group.handle(worker).show_merged.remote(step) for worker in workers}
            self._group.gather(NOTHING, calls)

    def figures(self, split: Literal["validation", "test"], step: int) -> Figures:
        """Compute, report and return the metrics of a split; its mean loss is called ``validation_loss``.

        With several tasks, names of metrics begin with the task's name, and ``validation_loss`` is the weighted mean
        loss. Tasks without samples in the split have none.

        Raises:
            NotFinite: the loss is not finite.
        """
        by_task: dict[str, Figures] = {}
        used: list[Objective] = []
        found: Figures = {}
        for task, objective in enumerate(self._facts.blueprint.objectives):
            if not self._facts.task_sizes[task][split]:
                continue
            predictions = [part.predictions() for part in self._parts(split, step, task)]
            found = figures_of(predictions, objective)
            if not all(map(math.isfinite, found.values())):
                raise not_finite(f"{split} loss", step)
            name = self._names[task] if self._names else None
            names = self._facts.class_names[task] if self._facts.class_names else None
            picture = picture_of(predictions, objective, names)
            if picture is not None:
                self._report(Pictured(task=name, split=split, step=step, **asdict(picture)))
            if name is not None:
                by_task[name] = found
                used.append(objective)
        if by_task:
            found = combined(by_task, used)
        self._report(Validated.of(split, step, found))
        return found

    def _parts(self, split: Literal["validation", "test"], step: int, task: int) -> list[EvaluationResult]:
        """Return the results of all microbatches of a task in a split, in order."""
        size = self._spec.training.microbatch_size
        starts = evaluation_starts([sizes[split] for sizes in self._facts.task_sizes], size)
        start, stop = starts[task], starts[task + 1]
        each = max(1, min(_EVALUATED_AT_ONCE, _MOST_TARGETS // size))
        parts: list[EvaluationResult] = []
        while start < stop:
            at_once = each * max(map(len, self._conductor.membership.stages))
            chunk = list(range(start, min(start + at_once, stop)))
            width = parts[0].score_width if parts else None
            parts += self._conductor.at_pause(partial(self._evaluate_some, split, step, chunk, width, task))
            start += len(chunk)
        return parts

    def _evaluate_some(
        self, split: Literal["validation", "test"], step: int, chunk: list[int], width: int | None, task: int
    ) -> list[EvaluationResult]:
        """Return the results of some microbatches with ``width`` scores per sample; None keeps the number of scores."""
        membership = self._conductor.membership
        self._load_merged(step)
        most_outputs = MOST_SCORES // self._facts.task_sizes[task][split]
        answers = self._group.gather(
            EVALUATION,
            {
                worker: self._group.handle(worker).evaluate.remote(
                    split, step, chunk, place, membership.stages, most_outputs, task
                )
                for place, stage in enumerate(membership.stages)
                for worker in stage
            },
        )
        last = membership.stages[-1]
        results: dict[int, EvaluationResult] = {}
        objective = self._facts.blueprint.objectives[task]
        for place, worker in enumerate(last):
            if set(answers[worker]) != {each for each in chunk if each % len(last) == place}:
                self._group.accuse(worker, "evaluations of other microbatches")
            for microbatch, result in answers[worker].items():
                if not result.fits(objective, self._targets(split, microbatch)):
                    self._group.accuse(worker, "predictions that the task does not have")
                width = result.score_width if width is None else width
                if result.score_width != width:
                    self._group.accuse(worker, "another number of scores than the other members")
            results |= answers[worker]
        return [results[microbatch] for microbatch in chunk]

    def _targets(self, split: Literal["validation", "test"], microbatch: int) -> int:
        """Return the number of targets of a microbatch; the last one of a task may have fewer samples."""
        training = self._spec.training
        sizes = [sizes[split] for sizes in self._facts.task_sizes]
        task, samples = evaluated_range(sizes, training.microbatch_size, microbatch)
        is_text = self._facts.blueprint.objectives[task].task == "language_model"
        return len(samples) * (training.sequence_length if is_text else 1)

    def sample(self, wanted: SamplesSpec, step: int) -> None:
        """Generate continuations of the prompts with the model, and report the texts."""

        def next_logits(ids: Tensor) -> Tensor:
            return self._conductor.at_pause(partial(self._next_logits, step, ids[0].tolist()))

        window = (self._facts.blueprint.config or {}).get("max_position_embeddings")
        for prompt, row in zip(wanted.prompts, self._facts.prompts, strict=True):
            made = continue_greedily(next_logits, row, wanted.max_tokens, window, self._facts.text_ends)
            text = ask_shard_store(TEXT, self._shard_store.text.remote(list(made)))
            self._report(Sampled(step=step, prompt=prompt, text=text))

    def _next_logits(self, step: int, ids: list[int]) -> Tensor:
        way = [stage[0] for stage in self._conductor.membership.stages]
        self._load_merged(step)
        answers = self._group.gather(
            LOGITS,
            {
                worker: self._group.handle(worker).next_logits.remote(step, ids, place, way)
                for place, worker in enumerate(way)
            },
        )
        logits = answers[way[-1]]
        if logits is None or not len(logits):
            self._group.accuse(way[-1], "no logits of the last stage")
        return torch.tensor(logits)

    def locate(self, failure: NotFinite) -> UserError:
        """Return an error that names the module or parameter with the first value that is not finite.

        Return `failure` itself if no member finds such a place, or if members are lost meanwhile.

        Args:
            failure: the error for the open step; its attribute ``step`` must be set.
        """
        step, membership = failure.step, self._conductor.membership
        assert step is not None
        own: dict[Worker, tuple[int, list[int]]] = {}
        for place, tasks in enumerate(membership.tasks_of(step)):
            for microbatch, task in enumerate(tasks):
                own.setdefault(task.worker, (place, []))[1].append(microbatch)
        try:
            findings = self._group.gather(
                FINDING,
                {
                    worker: self._group.handle(worker).find_nonfinite.remote(step, place, microbatches)
                    for worker, (place, microbatches) in own.items()
                },
            )
        except MembersLost:
            return failure
        finding = first_of(findings.values())
        if finding is None:
            return failure
        error = finding.error(step)
        error.message += failure.witnesses
        return error
