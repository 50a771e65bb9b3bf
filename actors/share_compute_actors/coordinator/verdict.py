"""What is found of a step that all members prepared, before it is committed.

Members of a pool must hold the same gradient, numbers must be numbers, and the norm of the whole gradient says by how
much it is clipped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from share_compute.errors import VerificationFailed
from share_compute.planning.words import listed
from share_compute.protocol.messages import Prepared
from share_compute.protocol.roster import Roster, Worker
from share_compute.specification import TrainingSpec
from share_compute.training.loss_scale import not_finite, update_factor


def require_agreement(
    roster: Roster, prepared: Mapping[Worker, Prepared], step: int, name: Callable[[Worker], str]
) -> None:
    """See that the members of each pool hold one gradient.

    Args:
        roster: of the epoch.
        prepared: what its members said of the step.
        step: not committed yet.
        name: of a member's machine.

    Raises:
        VerificationFailed: members of a pool hold different ones; says which of them differ from most.
    """
    for place, pool in enumerate(roster.pools):
        digests = {worker: prepared[worker].digest for worker in pool}
        counts = Counter(digests.values()).most_common()
        if len(counts) == 1:
            continue
        is_clear = counts[0][1] > counts[1][1]
        suspects = [worker for worker in pool if not is_clear or digests[worker] != counts[0][0]]
        names = listed([name(worker) for worker in suspects])
        differ = (
            f"the gradient on {names} is not that of the rest"
            if is_clear
            else f"the gradients on {names} differ"
        )
        raise VerificationFailed(
            f"in pool {place} {differ}, so step {step} was not taken",
            step=step,
            machine=name(suspects[0]),
            mend=f"check the memory of {names}, or let the job do without, then resume it from its last checkpoint",
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
    return math.sqrt(math.fsum(squares.values()))  # fsum is exact, so in any order the same
