"""The pauses of one attempt: the steps after which training pauses, and the work that is due in a pause."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from share_compute.specification import TrainingSpec
from share_compute_actors.training.shard_store import TrainingState


class MissedWork(Enum):
    """Work after the last step of an earlier attempt that must be repeated before the first step."""

    pause = "pause"
    """All work of the pause: merges, validation, sample texts and a checkpoint, each if it is due."""
    validation = "validation"
    """The validation and a checkpoint. The weights may be a merged version, so there is nothing to merge."""


class Pauses:
    """Decides after which steps training pauses, and which work is due then.

    Args:
        training: training settings of the job.
        sizes: number of samples, by split.
        is_first_branch: whether this attempt evaluates the model, which other branches hold, too.
    """

    def __init__(self, training: TrainingSpec, sizes: Mapping[str, int], *, is_first_branch: bool) -> None:
        self._training = training
        self._has_validation = sizes["validation"] > 0 and is_first_branch

    def is_after(self, step: int) -> bool:
        """Return whether training pauses after a step."""
        policy = self._training.rounds
        overlaps = policy is not None and step > policy.every and step % policy.every == policy.overlapping
        return self.ends_round(step) or overlaps or self.has_work_after(step)

    def ends_round(self, step: int) -> bool:
        """Return whether a round of branches, or the whole training, ends after a step."""
        training = self._training
        return step == training.steps or (
            training.rounds is not None and training.rounds.ends_round(step, training.steps)
        )

    def validates_after(self, step: int) -> bool:
        """Return whether a validation follows a step, unless it ends the training."""
        every = self._training.validate_every
        return bool(self._has_validation and every and step and step % every == 0)

    def has_work_after(self, step: int) -> bool:
        """Return whether a validation, a checkpoint or sample texts may be due after a step."""
        training = self._training
        return any(
            every is not None and step % every == 0
            for every in (
                training.validate_every,
                training.checkpoint_every,
                training.samples.every if training.samples is not None else None,
            )
        )

    def missed(self, state: TrainingState, *, has_trained: bool, is_merging: bool) -> MissedWork | None:
        """Return the work after a step that an earlier coordinator may not have done; None if there is none.

        Args:
            state: training state after the last committed step.
            has_trained: whether the weights include steps of this attempt's members.
            is_merging: whether a merge after this step was begun but not finished, or is due.
        """
        step, policy = state.step, self._training.rounds
        is_done = step == self._training.steps and all(validated < step for validated, _ in state.validations)
        if is_merging or is_done or (has_trained and self.is_after(step)):
            return MissedWork.pause
        # A checkpoint may have been saved before the validation after its step, e.g. because machines were cut off.
        is_due = self.validates_after(step) and all(each != step for each, _ in state.validations)
        # The weights may be a merged version. Then the round is over, and the branch must not contribute again. If
        # branches keep their own weights, they are not the merged weights, and validations use the merged ones.
        if is_due and not (policy is not None and policy.keeps_own_weights):
            return MissedWork.validation
        return None
