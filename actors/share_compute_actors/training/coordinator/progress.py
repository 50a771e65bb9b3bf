"""Tracks the progress of one attempt: its training state, facts about each step, and how long members computed.

The conductor reports progress to a `Listener`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from share_compute.lifecycle.attempt_events import AttemptEvent, Note, StepCommitted
from share_compute.models.objective import task_of
from share_compute.protocol.membership import Membership, Worker
from share_compute.specification import TrainJob
from share_compute.specification.task import figure_of
from share_compute.training.early_stopping import EarlyStopping, named, reaches
from share_compute.training.loss_scale import SKIPPED
from share_compute.training.metrics import Figures
from share_compute.training.optimizers import learning_rates
from share_compute.training.plateau import Plateau
from share_compute_actors.messages import StepFigures
from share_compute_actors.training.coordinator.verdict import Verdict
from share_compute_actors.training.shard_store import TrainingState
from share_compute_actors.training.step_log import StepFacts

_SMOOTHED_STEPS = 10


class Listener(ABC):
    """Receives the conductor's reports about steps and membership changes."""

    @abstractmethod
    def account(self, step: int, verdict: Verdict, figures: Mapping[Worker, StepFigures]) -> StepFacts:
        """Return the facts to write to the step log when a prepared step is committed."""

    @abstractmethod
    def committed(self, facts: StepFacts, figures: Mapping[Worker, StepFigures]) -> None:
        """Receive the facts about a step that was committed, and the figures that members reported in it."""

    @abstractmethod
    def reformed(
        self, before: Membership, after: Membership, lost: frozenset[Worker], seconds: float
    ) -> None:
        """Receive a membership change.

        Args:
            before: membership of the previous epoch.
            after: membership of the new epoch.
            lost: members that were lost.
            seconds: time for which no step was computed between the two epochs, in seconds.
        """

    @abstractmethod
    def ticked(self) -> None:
        """Do periodic work, such as polling a save in progress.

        The conductor calls this about every 0.5 s, except while training is paused.
        """


class TrainingProgress:
    """Computes the `StepFacts` of each step (loss, learning rate, speed), and holds the attempt's training state.

    Args:
        spec: the job, with a fixed number of microbatches.
        state: training state after the last committed step.
        report: receives events.
    """

    def __init__(self, spec: TrainJob, state: TrainingState, report: Callable[[AttemptEvent], None]) -> None:
        self._training = spec.training
        self._tasks = spec.tasks
        self._report = report
        self.state = state
        """Training state after the last committed step."""
        stopping = spec.training.early_stopping
        self._stopping = (
            EarlyStopping(stopping).after_all(state.validations) if stopping is not None else None
        )
        self._target = spec.training.target
        self._reached: Figures | None = None
        """Metrics of the validation that reached the target."""
        for _, figures in state.validations:
            self._compare(figures)
        self._end_reason = ""
        self._scheduled = learning_rates(spec.training)
        plateau = spec.training.schedule.plateau
        peak = spec.training.optimizer.learning_rate
        self._plateau = None if plateau is None else Plateau(plateau, peak).after_all(state.validations)
        self._seconds: deque[float] = deque(maxlen=_SMOOTHED_STEPS)
        self._last_end = time.monotonic()
        self._busy_s: dict[Worker, float] = defaultdict(float)
        self._trained_s = 0.0
        self._targets = 0
        """Number of targets in one microbatch; 0 before the first step is prepared."""

    @property
    def has_ended(self) -> bool:
        """Whether no step is left, or early stopping, the target or `end` ended the training."""
        stops = self._stopping is not None and self._stopping.stops
        return (
            stops
            or self._reached is not None
            or bool(self._end_reason)
            or self.state.step == self._training.steps
        )

    @property
    def was_ended(self) -> bool:
        """Whether `end` ended the training before its last step."""
        return bool(self._end_reason)

    @property
    def reason(self) -> str:
        """Reason why training ended, for the user."""
        done = f"{self.state.step} steps done"
        if self._reached is not None and self._target is not None:
            value = self._reached[self._target.figure]
            return (
                f"{done}: {named(self._target.figure)} {value:.4f} reached the target {self._target.value:g}"
            )
        if self._stopping and self._stopping.stops:
            return f"{done}: {self._stopping.reason}"
        return f"{done}: {self._end_reason}" if self._end_reason else done

    def end(self, reason: str) -> None:
        """End the training before its last step; this has no effect after the last step."""
        if not self.has_ended:
            self._end_reason = reason

    def begin_steps(self) -> None:
        """Restart the clock of the next step, so that the time of a validation or a checkpoint is not counted."""
        self._last_end = time.monotonic()

    def account(self, step: int, verdict: Verdict, figures: Mapping[Worker, StepFigures]) -> StepFacts:
        """Stop timing a step that is about to be committed, and start timing the next one; return the facts to write.

        Raises:
            UserError: no loss scale makes the gradients finite.
        """
        now = time.monotonic()
        seconds, self._last_end = now - self._last_end, now
        self._seconds.append(seconds)
        training = self._training
        # Figures lack the number of targets if members of the last stage died. The number never changes.
        each = self._targets = max((said.targets for said in figures.values()), default=0) or self._targets
        targets = each * len(verdict.losses)
        norm, is_clean = verdict.norm, math.isfinite(verdict.norm)
        rate = self._rate(step)
        event = StepCommitted(
            step=step,
            loss=math.fsum(verdict.losses.values()) / (each * len(verdict.losses)),
            learning_rate=self._scheduled(step) if rate is None else rate,
            gradient_norm=norm if training.max_gradient_norm is not None and is_clean else None,
            samples=training.batch_size,
            tokens=targets,
            seconds=seconds,
            tokens_per_s=targets * len(self._seconds) / sum(self._seconds),
            tasks=self._task_losses(verdict.losses),
        )
        loss_scale = self.state.loss_scale.after(1.0 if is_clean else SKIPPED, step)
        return StepFacts(event, loss_scale, is_skipped=not is_clean, rate=rate)

    def _task_losses(self, losses: Mapping[int, float]) -> dict[str, float] | None:
        """Return the mean loss of each task in a step, without its weight; None without tasks.

        Args:
            losses: summed loss of each microbatch, times the weight of its task.
        """
        found = {}
        for place, task in enumerate(self._tasks):
            own = [
                loss for microbatch, loss in losses.items() if task_of(microbatch, len(self._tasks)) == place
            ]
            found[figure_of(task.name, "loss")] = math.fsum(own) / (self._targets * len(own) * task.weight)
        return found or None

    def _rate(self, step: int) -> float | None:
        """Return the learning rate of a step, if it depends on validations; None if it depends only on the step."""
        if self._plateau is None:
            return None
        return self._plateau.rate * (self._scheduled(step) / self._training.optimizer.learning_rate)

    def committed(self, facts: StepFacts, figures: Mapping[Worker, StepFigures]) -> None:
        """Report a committed step, and update the training state."""
        step, seconds = facts.event.step, facts.event.seconds
        for worker, said in figures.items():
            self._busy_s[worker] += said.seconds - said.waited_s
        self._trained_s += seconds
        self._report(facts.event)
        if facts.is_skipped:
            self._report(
                Note(
                    message=f"step {step} changed nothing: its gradient is not finite in float16; "
                    f"the loss is multiplied by {facts.loss_scale.factor:g} from now on"
                )
            )
        self.state = replace(self.state, step=step, loss_scale=facts.loss_scale)

    def validated(self, step: int, figures: Figures) -> bool:
        """Add a validation to the training state, which may end the training; return whether it reached the target."""
        self.state = replace(self.state, validations=(*self.state.validations, (step, figures)))
        self._stopping = self._stopping and self._stopping.after(step, figures)
        self._compare(figures)
        self._plateau = self._plateau and self._plateau.after(figures)
        return self._reached is not None

    def _compare(self, figures: Figures) -> None:
        if self._target is not None and reaches(self._target, figures):
            self._reached = figures

    def tested(self, figures: Figures) -> None:
        """Add the final test to the training state."""
        self.state = replace(self.state, test=figures)

    def busy_fractions(self) -> dict[Worker, float]:
        """Return the fraction of this attempt's step time that each member spent computing, by member."""
        return {worker: busy_s / max(self._trained_s, 1e-9) for worker, busy_s in self._busy_s.items()}
