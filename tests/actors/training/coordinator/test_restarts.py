"""The work that an attempt repeats before its first step, because an earlier attempt ended in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.api.playing import step

from share_compute.lifecycle.attempt_events import AttemptEvent, Validated
from share_compute.specification import TrainJob, parse_job
from share_compute.training.loss_scale import LossScale, first_loss_scale
from share_compute.training.metrics import Figures
from share_compute_actors.training.coordinator.pauses import MissedWork, Pauses
from share_compute_actors.training.rounds.branch_events import BranchEvents
from share_compute_actors.training.shard_store import TrainingState
from share_compute_actors.training.step_log import StepFacts, StepLog


def spec_of(**synchronization: Any) -> TrainJob:
    training: dict[str, Any] = {"steps": 12, "batch_size": 8, "microbatches": 2, "validate_every": 4}
    if synchronization:
        training["synchronization"] = {"branches": 2, "every": 4, **synchronization}
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    return parse_job({"model": {"layers": layers}, "data": {"dataset": "digits"}, "training": training})


@pytest.fixture
def step_log(tmp_path: Path) -> Iterator[StepLog]:
    """Return the log of an attempt that begins after step 4; the attempt before it merged and ended there."""
    with closing(StepLog(tmp_path, 1)) as before:
        epoch = before.claim().epoch
        for number in range(1, 5):
            scale = LossScale(1.0, clean_steps=number, is_dynamic=False)
            before.commit(epoch, number, 1.0, StepFacts(step(number), scale, rate=None))
        assert before.begin_merge(4, 0) == 0
        before.end_merge(4)
    with closing(StepLog(tmp_path, 2)) as log:
        log.claim()
        log.rewind(4, 1)
        yield log


def missed(spec: TrainJob, log: StepLog, *validations: int, step: int = 4) -> MissedWork | None:
    """Return the work before the first step of an attempt that begins with the weights of a checkpoint.

    Args:
        spec: the job.
        log: the step log of the attempt.
        validations: steps whose validations belong to the state with which the attempt begins.
        step: last step of the checkpoint.
    """
    figures: Figures = {"validation_loss": 1.0}
    validated = tuple((number, figures) for number in validations)
    state = TrainingState(step, first_loss_scale(spec.training.precision), validated)
    pauses = Pauses(spec.training, {"validation": 10, "test": 0}, is_first_branch=True)
    return pauses.missed(state, has_trained=False, is_merging=log.is_merging(step))


def test_a_validation_that_is_missing_is_repeated_before_the_first_step(step_log: StepLog) -> None:
    assert missed(spec_of(), step_log) is MissedWork.validation
    assert missed(spec_of(), step_log, 4) is None
    assert missed(spec_of(), step_log, step=6) is None


def test_a_branch_that_begins_with_merged_weights_does_not_contribute_them(step_log: StepLog) -> None:
    assert step_log.open_merge is None
    assert missed(spec_of(kind="local"), step_log) is MissedWork.validation
    assert missed(spec_of(kind="local"), step_log, 4) is None
    # The weights of the branch are not the merged ones.
    assert missed(spec_of(kind="elastic", rate=0.3), step_log) is None


def test_a_merge_that_was_begun_is_ended_before_the_first_step(step_log: StepLog) -> None:
    step_log.begin_merge(4, 1)
    assert missed(spec_of(kind="local"), step_log, 4) is MissedWork.pause


def test_the_end_of_the_training_is_repeated_until_its_validation_is_known(step_log: StepLog) -> None:
    assert missed(spec_of(), step_log, 4, 8, step=12) is MissedWork.pause
    assert missed(spec_of(), step_log, 4, 8, 12, step=12) is None


def test_a_repeated_validation_counts_once() -> None:
    reported: list[AttemptEvent] = []
    events = BranchEvents([], reported.append, 0)
    first: Any = SimpleNamespace(number=0)
    for number, loss in ((4, 2.0), (8, 1.5), (4, 2.0), (8, 1.0)):
        events.pass_on(first, Validated(split="validation", step=number, loss=loss))
    assert [(number, figures["validation_loss"]) for number, figures in events.validations] == [
        (4, 2.0),
        (8, 1.0),
    ]
    assert len(reported) == 4
