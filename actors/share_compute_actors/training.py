"""The training loop as the coordinator runs it: steps, validations, checkpoints, in order."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any, Literal

from share_compute.errors import UserError
from share_compute.jobs.events import AttemptEvent, StepCommitted, Validated
from share_compute.planning.plan import Plan
from share_compute.specification import TrainJob
from share_compute.training.optimizers import learning_rates
from share_compute_actors.crew import Crew
from share_compute_actors.library import LibraryFacts
from share_compute_actors.messages import MemberId, StepResult

_STEPS_AHEAD = 2
"""Steps that members are told of before the first of them is done: none waits for the coordinator."""
_SMOOTHED_STEPS = 10
_EVALUATED_AT_ONCE = 8
"""Microbatches on their way through the pools in one evaluation call: bounds what waits in the channels."""


class TrainingLoop:
    """Steps 'first' to 'total' of one attempt.

    Args:
        spec: the job, with its number of microbatches settled.
        plan: who holds what.
        facts: what the library said.
        crew: the members.
        tell: takes what happens.
        observe: takes each step's number, its seconds and what the members said of it.
    """

    def __init__(
        self,
        spec: TrainJob,
        plan: Plan,
        facts: LibraryFacts,
        crew: Crew,
        tell: Callable[[AttemptEvent], None],
        observe: Callable[[int, float, Collection[StepResult]], None] | None = None,
    ) -> None:
        self._observe = observe
        self._spec = spec
        self._plan = plan
        self._facts = facts
        self._crew = crew
        self._tell = tell
        self._rate = learning_rates(spec.training)
        self._seconds: deque[float] = deque(maxlen=_SMOOTHED_STEPS)
        self._last_end = time.monotonic()
        self._busy_s: dict[MemberId, float] = defaultdict(float)
        self._trained_s = 0.0

    def run(self, checkpoint: Callable[[int], None]) -> None:
        """Run all steps that are left, then the last checkpoint and the final test."""
        training = self._spec.training
        calls: deque[tuple[int, dict[MemberId, Any]]] = deque()
        self._last_end = time.monotonic()
        for step in range(self._facts.first_step, training.steps + 1):
            calls.append((step, self._crew.call("step", step)))
            pause = self._pauses_after(step)
            while len(calls) > (0 if pause else _STEPS_AHEAD - 1):
                self._finish(*calls.popleft())
            if pause:
                self._between(step, checkpoint)
        if self._facts.sizes["test"]:
            self._evaluate("test", training.steps)

    def _pauses_after(self, step: int) -> bool:
        training = self._spec.training
        return step == training.steps or any(
            every is not None and step % every == 0
            for every in (training.validate_every, training.checkpoint_every)
        )

    def _between(self, step: int, checkpoint: Callable[[int], None]) -> None:
        training = self._spec.training
        ended = step == training.steps
        if self._facts.sizes["validation"] and (
            ended or (training.validate_every and step % training.validate_every == 0)
        ):
            self._evaluate("validation", step)
        if ended or (training.checkpoint_every and step % training.checkpoint_every == 0):
            checkpoint(step)
        self._last_end = time.monotonic()

    def _finish(self, step: int, calls: dict[MemberId, Any]) -> None:
        results: Collection[StepResult] = self._crew.gather(calls).values()
        now = time.monotonic()
        seconds, self._last_end = now - self._last_end, now
        self._seconds.append(seconds)
        training = self._spec.training
        targets = sum(result.targets for result in results)
        total = math.fsum(result.loss_sum for result in results if result.loss_sum is not None)
        norm = next(iter(results)).gradient_norm
        for result in results:
            self._busy_s[result.me] += result.seconds - result.waited_s
        self._trained_s += seconds
        self._require_finite(step, total, norm or 0.0)
        self._tell(
            StepCommitted(
                step=step,
                loss=total / targets,
                learning_rate=self._rate(step),
                gradient_norm=norm,
                samples=training.batch_size,
                tokens=targets,
                seconds=seconds,
                tokens_per_s=targets * len(self._seconds) / sum(self._seconds),
            )
        )
        if self._observe is not None:
            self._observe(step, seconds, results)

    def _require_finite(self, step: int, *figures: float) -> None:
        if not all(math.isfinite(figure) for figure in figures):
            raise UserError(
                f"the loss or its gradient is not finite at step {step}",
                step=step,
                mend="lower the learning rate or clip gradients (training.max_gradient_norm)",
            )

    def busy_fractions(self) -> dict[MemberId, float]:
        """Return for each member the share of the time of all steps in which it computed."""
        return {me: busy_s / max(self._trained_s, 1e-9) for me, busy_s in self._busy_s.items()}

    def _evaluate(self, split: Literal["validation", "test"], step: int) -> None:
        count = -(-self._facts.sizes[split] // self._spec.training.microbatch_size)
        loss, targets, correct = 0.0, 0, 0
        at_once = _EVALUATED_AT_ONCE * max(self._plan.pool_sizes)
        for start in range(0, count, at_once):
            chunk = range(start, min(start + at_once, count))
            for result in self._crew.ask("evaluate", split, step, list(chunk)).values():
                if result is not None:
                    loss += result.loss_sum
                    targets += result.targets
                    correct += result.correct
        mean = loss / targets
        self._require_finite(step, mean)
        language = self._facts.blueprint.task == "language"
        self._tell(
            Validated(
                split=split,
                step=step,
                loss=mean,
                accuracy=None if language else correct / targets,
                perplexity=math.exp(min(mean, 700.0)) if language else None,
            )
        )
