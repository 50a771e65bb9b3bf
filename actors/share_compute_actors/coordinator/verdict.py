"""What is found of a step that all members prepared, before it is committed.

Numbers must be finite, and the norm of the whole gradient says by how much it is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from share_compute.errors import VerificationFailed
from share_compute.planning.words import listed
from share_compute.protocol.messages import Prepared
from share_compute.protocol.roster import Worker
from share_compute.specification import TrainingSpec
from share_compute.training.loss_scale import not_finite, update_factor


def disputed(workers: Collection[Worker], step: int, name: Callable[[Worker], str]) -> VerificationFailed:
    """Return the error for members that hold different gradients, where it cannot be told whose is wrong.

    Args:
        workers: the members.
        step: not committed.
        name: of a member's machine.
    """
    names = listed(sorted(map(name, workers)))
    return VerificationFailed(
        f"the gradients on {names} differ, also when they are computed again, so step {step} was not taken",
        step=step,
        machine=names,
        mend=f"check the memory of {names}, or let the job do without one of them, then resume it from its last "
        "checkpoint; with three machines in a stage, two outvote the third",
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the members' words say of a whole step."""

    losses: Mapping[int, float]
    """Summed loss of each microbatch."""
    norm: float
    """Of the whole gradient, without the loss scale."""
    factor: float
    """What the gradient is multiplied by."""


def judge(prepared: Mapping[Worker, Prepared], training: TrainingSpec, step: int) -> Verdict:
    """Return what follows from what all members prepared.

    Raises:
        NotFinite: the step must not be committed.
    """
    losses, norm = losses_of(prepared), global_norm(prepared)
    if not math.isfinite(sum(losses.values())):
        raise not_finite("loss", step)
    factor = update_factor(norm, training.max_gradient_norm, training.precision, step)
    return Verdict(losses, norm, factor)


def losses_of(prepared: Mapping[Worker, Prepared]) -> dict[int, float]:
    """Return the summed loss of each microbatch."""
    losses: dict[int, float] = {}
    for message in prepared.values():
        losses.update(message.losses)
    return losses


def global_norm(prepared: Mapping[Worker, Prepared]) -> float:
    """Return the norm of the whole gradient; the same, however layers are cut into pools.

    Members of a pool say the same, and so do both holders of a tied parameter: each name counts once.
    """
    squares: dict[str, float] = {}
    for message in prepared.values():
        squares.update(message.squared_norms)
    try:
        return math.sqrt(math.fsum(squares.values()))  # fsum is exact, so in any order the same
    except OverflowError:
        return math.inf
