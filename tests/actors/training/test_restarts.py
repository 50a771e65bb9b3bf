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
from share_compute_actors.training.coordinator.branch_rounds import BranchRounds
from share_compute_actors.training.coordinator.progress import TrainingProgress
from share_compute_actors.training.coordinator.training_run import TrainingRun
from share_compute_actors.training.rounds.branch_events import BranchEvents
from share_compute_actors.training.shard_store import TrainingState
from share_compute_actors.training.step_log import StepFacts, StepLog


class Trained(Exception):
    """Raised when the attempt reaches its first step."""


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


def begin(spec: TrainJob, log: StepLog, *validations: int) -> list[str]:
    """Begin an attempt after step 4, from merged weights if there are branches; return what precedes step 5.

    Args:
        spec: the job.
        log: the step log of the attempt.
        validations: steps whose validations belong to the state with which the attempt begins.
    """
    done: list[str] = []
    figures: Figures = {"validation_loss": 1.0}
    state = TrainingState(
        4, first_loss_scale(spec.training.precision), tuple((number, figures) for number in validations)
    )
    run: Any = TrainingRun.__new__(TrainingRun)
    branch = None
    run._rounds = None
    if spec.training.rounds is not None:
        branch = SimpleNamespace(number=0)
        rounds: Any = BranchRounds.__new__(BranchRounds)
        rounds._step_log, rounds._policy, rounds._branch = log, spec.training.rounds, branch
        rounds._open, rounds.merged = None, None
        rounds._versions = lambda: [1]
        rounds._send = lambda number, *_, **__: done.append(f"contribution to round {number}")
        rounds.merge = lambda *_: done.append("merge")
        run._rounds = rounds
    run._training, run._step_log = spec.training, log
    run._assignment = SimpleNamespace(branch=branch, spec=spec)
    run._start = SimpleNamespace(
        state=state, facts=SimpleNamespace(first_step=5, sizes={"validation": 10, "test": 0})
    )
    run._progress = TrainingProgress(spec, state, lambda _: None)

    def validate(_split: str, number: int) -> Figures:
        done.append(f"validation {number}")
        return figures

    def train(_until: int) -> None:
        raise Trained

    run._evaluation = SimpleNamespace(show_merged=lambda _: None, figures=validate)
    run._save_after = lambda _: None
    run._steps = train
    with pytest.raises(Trained):
        run._train()
    return done


def test_a_validation_that_is_missing_is_repeated_before_the_first_step(step_log: StepLog) -> None:
    assert begin(spec_of(), step_log) == ["validation 4"]
    assert begin(spec_of(), step_log, 4) == []


def test_a_branch_that_begins_with_merged_weights_does_not_contribute_them(step_log: StepLog) -> None:
    assert begin(spec_of(kind="local"), step_log) == ["validation 4"]
    assert begin(spec_of(kind="local"), step_log, 4) == []
    assert begin(spec_of(kind="elastic", rate=0.3), step_log) == []  # its weights are not the merged ones


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
