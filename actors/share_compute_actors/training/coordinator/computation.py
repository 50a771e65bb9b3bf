"""Chooses whether the members of a job compute with compiled or with eager code."""

from __future__ import annotations

from collections.abc import Callable

from share_compute.errors import CompilerFailed
from share_compute.lifecycle.attempt_events import AttemptEvent, ComputationChosen
from share_compute.specification import Compiling
from share_compute_actors.compiled.choice import choose, gain_of
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.training.step_log import StepLog


def choose_computation(
    mode: Compiling, group: TrainingGroup, step_log: StepLog, report: Callable[[AttemptEvent], None]
) -> None:
    """Choose compiled or eager code for the new members of an attempt, unless an earlier attempt has chosen it.

    The choice is in the step log, so replacement members compute the same bits. If machines of a later attempt cannot
    compile, the job continues with eager code.

    Members of an earlier attempt must not be asked: they know the choice, and may wait for a lost member until the next
    epoch begins.

    Args:
        mode: ``training.compile`` of the job.
        group: the members, each with its shard.
        step_log: the step log, claimed by the attempt.
        report: receives the choice.

    Raises:
        MembersLost: all members died.
    """
    if mode == "off":
        return
    known = step_log.is_compiled
    if known is not False:
        try:
            times = list(group.compare_compiled().values())
        except CompilerFailed as failure:
            give_up_compiling(failure, step_log, report)
        else:
            chosen = choose("on" if known else mode, times, gain_of(times))
            step_log.choose_computation(is_compiled=chosen.is_compiled)
            report(ComputationChosen(**chosen.model_dump()))
    group.choose_computation(is_compiled=step_log.is_compiled is True)


def give_up_compiling(
    failure: CompilerFailed, step_log: StepLog, report: Callable[[AttemptEvent], None]
) -> None:
    """Write and report that a job computes with eager code from now on, because a machine cannot compile it.

    Args:
        failure: the error of the machine.
        step_log: the step log, claimed by the attempt.
        report: receives the choice.
    """
    sentence = f"eager, because {failure.message}"
    if step_log.is_compiled:
        sentence = (
            "eager from the last checkpoint on, so the weights will differ in the last bits from those of compiled "
            f"code: {failure.message}"
        )
    step_log.choose_computation(is_compiled=False)
    report(ComputationChosen(is_compiled=False, sentence=sentence))
