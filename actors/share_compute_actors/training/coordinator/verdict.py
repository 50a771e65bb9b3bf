"""Checks the losses and the gradient of a step before it is committed, and creates the errors for wrong numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from share_compute.errors import VerificationFailed
from share_compute.lifecycle.attempt_events import Offended
from share_compute.protocol.coordinator import Blame, Diverged, StartOver
from share_compute.protocol.membership import Worker
from share_compute.protocol.messages import Prepared
from share_compute.quantities import listed
from share_compute.specification import TrainingSpec
from share_compute.training.loss_scale import NotFinite, not_finite, update_factor


def disputed(workers: Collection[Worker], step: int, name: Callable[[Worker], str]) -> VerificationFailed:
    """Return the error for members that hold different gradients, if it cannot be decided which gradient is wrong.

    Args:
        workers: the members.
        step: number of the step, which is not committed.
        name: returns the name of a member's machine.
    """
    names = listed(sorted(map(name, workers)))
    return VerificationFailed(
        f"the gradients on {names} differ, also when they are computed again, so step {step} was not taken",
        step=step,
        machine=names,
        hint=f"check the memory of {names}, or let the job do without one of them, then resume it from its last "
        "checkpoint; with three machines in a stage, two outvote the third",
    )


def again(effect: StartOver, name: Callable[[Worker], str]) -> str:
    """Return the reason why a step is computed again, as text for the user."""
    if effect.workers:
        names = listed(sorted(map(name, effect.workers)))
        return f"the gradients on {names} differ, so step {effect.step} is computed again"
    return f"numbers of step {effect.step} are not finite, so it is computed again and each cell is checked"


def diverged(effect: Diverged, found: NotFinite | None, name: Callable[[Worker], str]) -> NotFinite:
    """Return the error for non-finite numbers that no single machine is known to have caused.

    Args:
        effect: the effect of the protocol's state machine.
        found: the last error of `judge`; None if there was none.
        name: returns the name of a member's machine.
    """
    failure = found or not_finite("gradient", effect.step)
    if effect.is_alone:
        failure.witnesses = (
            "; no other machine could compute it again to tell a faulty machine from a faulty model"
        )
    elif effect.by:
        failure.witnesses = f"; {listed(sorted(map(name, effect.by)))} found the same"
    failure.message += failure.witnesses
    return failure


def offence(blame: Blame, name: Callable[[Worker], str], *, is_over: bool) -> Offended:
    """Return the event that reports that a machine computed wrong numbers.

    Args:
        blame: the effect of the protocol's state machine.
        name: returns the name of a member's machine.
        is_over: whether the job now quarantines the machine.
    """
    machine = name(blame.worker)
    source = "" if blame.accuser is None else f", as {name(blame.accuser)} reports"
    sentence = f"{machine} made wrong numbers in step {blame.step}{source}: {blame.what}. "
    sentence += "They were not used; the step continues without it"
    if is_over:
        sentence += f". {machine} is quarantined"
    return Offended(
        machine=blame.worker,
        step=blame.step,
        what=blame.what,
        quarantined=is_over,
        accuser=blame.accuser,
        sentence=sentence,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Losses, gradient norm and gradient factor of a whole step, from the members' messages."""

    losses: Mapping[int, float]
    """Summed loss of each microbatch, by microbatch id."""
    norm: float
    """L2 norm of the whole gradient, divided by the loss scale."""
    factor: float
    """Factor by which the gradient is multiplied; `SKIPPED` if the step must change no weights."""


def judge(prepared: Mapping[Worker, Prepared], training: TrainingSpec, step: int) -> Verdict:
    """Return the verdict on a step, from the messages of all members.

    Raises:
        NotFinite: the loss is not finite, or the gradient is not finite and the precision is not float16.
    """
    losses, norm = losses_of(prepared), global_norm(prepared)
    if not math.isfinite(sum(losses.values())):
        raise not_finite("loss", step)
    factor = update_factor(norm, training.max_gradient_norm, training.precision, step)
    return Verdict(losses, norm, factor)


def losses_of(prepared: Mapping[Worker, Prepared]) -> dict[int, float]:
    """Return the summed loss of each microbatch, by microbatch id."""
    losses: dict[int, float] = {}
    for message in prepared.values():
        losses.update(message.losses)
    return losses


def global_norm(prepared: Mapping[Worker, Prepared]) -> float:
    """Return the L2 norm of the whole gradient; infinity if it overflows.

    Each parameter counts once, because all members that hold a parameter report the same value for it.
    """
    squares: dict[str, float] = {}
    for message in prepared.values():
        squares.update(message.squared_norms)
    try:
        return math.sqrt(math.fsum(squares.values()))  # fsum rounds once, so the order does not matter
    except OverflowError:
        return math.inf
