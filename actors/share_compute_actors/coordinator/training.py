"""The training loop of the coordinator: steps, validations and checkpoints, in order."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from share_compute.errors import UserError
from share_compute.jobs.events import AttemptEvent, Note, Sampled, StepCommitted, Validated
from share_compute.protocol.roster import Worker
from share_compute.specification import SamplesSpec, TrainJob
from share_compute.training.early_stopping import EarlyStopping
from share_compute.training.finiteness import first_of
from share_compute.training.loss_scale import SKIPPED, NotFinite, not_finite
from share_compute.training.optimizers import learning_rates
from share_compute.training.sampling import continue_greedily
from share_compute_actors.coordinator.conductor import Conductor
from share_compute_actors.coordinator.library import LibraryFacts, TrainingState
from share_compute_actors.coordinator.record import StepFacts
from share_compute_actors.coordinator.training_group import TrainingGroup
from share_compute_actors.coordinator.verdict import Verdict
from share_compute_actors.group.answering import ask_library
from share_compute_actors.group.exceptions import MembersLost
from share_compute_actors.member.schemas import EVALUATION, FINDING, LOGITS
from share_compute_actors.messages import EvaluationResult, StepFigures
from share_compute_actors.wire import TEXT

Checkpoint: TypeAlias = Callable[[TrainingState, bool], None]
_SMOOTHED_STEPS = 10
_EVALUATED_AT_ONCE = 8
"""Microbatches in one evaluation call, per member of the largest stage: bounds the data that waits in the channels."""


class TrainingLoop:
    """All steps of one attempt.

    Args:
        spec: the job, with its number of microbatches settled.
        facts: the facts that the shard store returned.
        crew: the members.
        library: the shard store's actor, which has the tokenizer.
        tell: receives events.
        observe: receives the number of each step, its duration in seconds and the members' figures.
        paused_early: called with the training state at a pause that comes earlier than planned; saves state that is due
            for a checkpoint or would be lost.
        validated: receives step and loss of each validation.
    """

    def __init__(
        self,
        spec: TrainJob,
        facts: LibraryFacts,
        crew: TrainingGroup,
        library: Any,
        tell: Callable[[AttemptEvent], None],
        observe: Callable[[int, float, Mapping[Worker, StepFigures]], None],
        paused_early: Callable[[TrainingState], None] = lambda _state: None,
        validated: Callable[[int, float], None] = lambda _step, _loss: None,
    ) -> None:
        self._spec = spec
        self._facts = facts
        self._crew = crew
        self._library = library
        self.state = facts.state
        """Training state after the last committed step."""
        stopping = spec.training.early_stopping
        self._stopping = (
            EarlyStopping(stopping).after_all(facts.state.validations) if stopping is not None else None
        )
        self._tell = tell
        self._observe = observe
        self._paused_early = paused_early
        self._validated = validated
        self._rate = learning_rates(spec.training)
        self._seconds: deque[float] = deque(maxlen=_SMOOTHED_STEPS)
        self._last_end = time.monotonic()
        self._busy_s: dict[Worker, float] = defaultdict(float)
        self._trained_s = 0.0
        self._targets = 0
        """Number of targets in one microbatch."""

    def run(self, conductor: Conductor, checkpoint: Checkpoint, *, goes_on: bool = False) -> str:
        """Run all steps that are left, then the last checkpoint and the final test; return the reason why it ended.

        Args:
            conductor: runs the steps.
            checkpoint: saves the training state; its second argument says whether to wait until it is whole.
            goes_on: whether an earlier coordinator may have died between the last step and the work that follows it.

        Raises:
            UserError: numbers of a step are not finite; the message names the place where this first happened.
        """
        total = self._spec.training.steps
        if goes_on and self._pauses_after(self.state.step):
            self._between(self.state.step, conductor, checkpoint)
        while not self._has_ended:
            step = self.state.step
            step = next(number for number in range(step + 1, total + 1) if self._pauses_after(number))
            self._last_end = time.monotonic()
            try:
                while conductor.steps(step) < step:
                    self._paused_early(self.state)
                    conductor.change()
            except NotFinite as failure:
                raise self._found(failure, conductor) from failure
            self._between(step, conductor, checkpoint)
        if self._facts.sizes["test"]:
            self._evaluate("test", self.state.step, conductor)
        done = f"{self.state.step} steps done"
        return f"{done}: {self._stopping.reason}" if self._stopping and self._stopping.stops else done

    @property
    def _has_ended(self) -> bool:
        stops = self._stopping is not None and self._stopping.stops
        return stops or self.state.step == self._spec.training.steps

    def _found(self, failure: NotFinite, conductor: Conductor) -> UserError:
        """Return an error that names where numbers stopped being finite; `failure` itself if no member knows."""
        step, roster = failure.step, conductor.roster
        assert step is not None
        own: dict[Worker, tuple[int, list[int]]] = {}
        for place, tasks in enumerate(roster.tasks_of(step)):
            for microbatch, task in enumerate(tasks):
                own.setdefault(task.worker, (place, []))[1].append(microbatch)
        try:
            findings = self._crew.gather(
                FINDING,
                {
                    worker: self._crew.handle(worker).find_nonfinite.remote(step, place, microbatches)
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

    def _pauses_after(self, step: int) -> bool:
        training = self._spec.training
        return step == training.steps or any(
            every is not None and step % every == 0
            for every in (
                training.validate_every,
                training.checkpoint_every,
                training.samples.every if training.samples is not None else None,
            )
        )

    def _between(self, step: int, conductor: Conductor, checkpoint: Checkpoint) -> None:
        training = self._spec.training
        if self._facts.sizes["validation"] and (
            self._has_ended or (training.validate_every and step % training.validate_every == 0)
        ):
            loss = self._evaluate("validation", step, conductor)
            self._validated(step, loss)
            self.state = replace(self.state, validations=(*self.state.validations, (step, loss)))
            self._stopping = self._stopping and self._stopping.after(step, loss)
        if training.samples is not None and step % training.samples.every == 0:
            self._sample(training.samples, step, conductor)
        if self._has_ended or (training.checkpoint_every and step % training.checkpoint_every == 0):
            checkpoint(self.state, self._has_ended)

    def account(self, step: int, verdict: Verdict, figures: Mapping[Worker, StepFigures]) -> StepFacts:
        """Return the facts to report about a step that all members have prepared, once it is committed.

        Raises:
            UserError: no loss scale makes the gradients finite.
        """
        now = time.monotonic()
        seconds, self._last_end = now - self._last_end, now
        self._seconds.append(seconds)
        training = self._spec.training
        # No figures have it if the last stage's members that computed the step died. It is the same for all steps.
        each = self._targets = max((said.targets for said in figures.values()), default=0) or self._targets
        targets = each * training.batch_size // training.microbatch_size
        norm, is_clean = verdict.norm, math.isfinite(verdict.norm)
        event = StepCommitted(
            step=step,
            loss=math.fsum(verdict.losses.values()) / (each * len(verdict.losses)),
            learning_rate=self._rate(step),
            gradient_norm=norm if training.max_gradient_norm is not None and is_clean else None,
            samples=training.batch_size,
            tokens=targets,
            seconds=seconds,
            tokens_per_s=targets * len(self._seconds) / sum(self._seconds),
        )
        loss_scale = self.state.loss_scale.after(1.0 if is_clean else SKIPPED, step)
        return StepFacts(event, loss_scale, is_skipped=not is_clean)

    def committed(self, facts: StepFacts, figures: Mapping[Worker, StepFigures]) -> None:
        """Report a committed step, and update the training state."""
        step, seconds = facts.event.step, facts.event.seconds
        for worker, said in figures.items():
            self._busy_s[worker] += said.seconds - said.waited_s
        self._trained_s += seconds
        self._tell(facts.event)
        if facts.is_skipped:
            self._tell(
                Note(
                    message=f"step {step} changed nothing: its gradient is not finite in float16; "
                    f"the loss is multiplied by {facts.loss_scale.factor:g} from now on"
                )
            )
        self.state = replace(self.state, step=step, loss_scale=facts.loss_scale)
        self._observe(step, seconds, figures)

    def busy_fractions(self) -> dict[Worker, float]:
        """Return the fraction of all steps' time in which each member computed."""
        return {worker: busy_s / max(self._trained_s, 1e-9) for worker, busy_s in self._busy_s.items()}

    def _evaluate(self, split: Literal["validation", "test"], step: int, conductor: Conductor) -> float:
        """Report the mean loss on a split, and return it.

        Raises:
            NotFinite: the loss is not finite.
        """
        count = -(-self._facts.sizes[split] // self._spec.training.microbatch_size)
        parts: list[EvaluationResult] = []
        start = 0
        while start < count:
            at_once = _EVALUATED_AT_ONCE * max(map(len, conductor.roster.pools))
            chunk = list(range(start, min(start + at_once, count)))
            parts += conductor.at_pause(partial(self._evaluate_some, split, step, chunk, conductor))
            start += len(chunk)
        mean = sum(part.loss_sum for part in parts) / sum(part.targets for part in parts)
        if not math.isfinite(mean):
            raise not_finite(f"{split} loss", step)
        language = self._facts.blueprint.task == "language"
        correct = sum(part.correct for part in parts) / sum(part.targets for part in parts)
        self._tell(
            Validated(
                split=split,
                step=step,
                loss=mean,
                accuracy=None if language else correct,
                perplexity=math.exp(min(mean, 700.0)) if language else None,
            )
        )
        return mean

    def _evaluate_some(
        self, split: Literal["validation", "test"], step: int, chunk: list[int], conductor: Conductor
    ) -> list[EvaluationResult]:
        roster = conductor.roster
        answers = self._crew.gather(
            EVALUATION,
            {
                worker: self._crew.handle(worker).evaluate.remote(split, step, chunk, place, roster.pools)
                for place, pool in enumerate(roster.pools)
                for worker in pool
            },
        )
        return [answer for answer in answers.values() if answer is not None]

    def _sample(self, wanted: SamplesSpec, step: int, conductor: Conductor) -> None:
        """Have the model continue the prompts, and report the texts."""

        def next_logits(ids: Tensor) -> Tensor:
            return conductor.at_pause(partial(self._next_logits, step, ids[0].tolist(), conductor))

        window = (self._facts.blueprint.config or {}).get("max_position_embeddings")
        for prompt, row in zip(wanted.prompts, self._facts.prompts, strict=True):
            made = continue_greedily(next_logits, row, wanted.max_tokens, window, self._facts.text_ends)
            text = ask_library(TEXT, self._library.text.remote(list(made)))
            self._tell(Sampled(step=step, prompt=prompt, text=text))

    def _next_logits(self, step: int, ids: list[int], conductor: Conductor) -> Tensor:
        way = [pool[0] for pool in conductor.roster.pools]
        answers = self._crew.gather(
            LOGITS,
            {
                worker: self._crew.handle(worker).next_logits.remote(step, ids, place, way)
                for place, worker in enumerate(way)
            },
        )
        logits = answers[way[-1]]
        if logits is None or not len(logits):
            self._crew.accuse(way[-1], "no logits of the last pool")
        return torch.tensor(logits)
