"""Finds the members of a stage whose reduced gradient deviates, from digests of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from share_compute.protocol.roster import Worker


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the digests of one stage say.

    Args:
        deviating: members whose gradient is wrong.
        disputed: members of which some hold a wrong gradient, and it cannot be told which. Empty where it can.
    """

    deviating: frozenset[Worker] = frozenset()
    disputed: frozenset[Worker] = frozenset()


def compare(digests: Mapping[Worker, str], before: Mapping[Worker, str]) -> Agreement:
    """Compare the digests of one stage.

    More than half of the members outvote the others. Where there is no such majority, all cells are computed again and
    each member is compared with its own first answer: the same inputs give the same bits, so a member whose answer
    changed is wrong. Nobody is wrong for certain where all members changed theirs and agree now.

    A first answer stands when its member is gone, so the loss of one member does not let its opponent win. A member
    that came later computes with weights that a member in dispute gave to it. So it has a voice only while all first
    members are there, and only for one of their first answers: another one may come from those weights.

    Args:
        digests: of the reduced gradient, by member of the stage.
        before: the first answers, where the step was computed again since no majority was found; else empty.
    """
    everybody = frozenset(digests.keys() | before.keys())
    gone, late = before.keys() - digests.keys(), digests.keys() - before.keys() if before else set()
    voices = {
        **before,
        **{worker: digest for worker, digest in digests.items() if not (gone and worker in late)},
    }
    (common, votes), *_ = Counter(voices.values()).most_common(1)
    changed = {worker for worker in before.keys() & digests.keys() if before[worker] != digests[worker]}
    if late and not set(digests.values()) & set(before.values()):
        return Agreement(disputed=everybody)
    if 2 * votes > len(voices) and (not late or common in before.values()):
        outvoted = {worker for worker, digest in digests.items() if digest != common}
        deviating = outvoted | changed
        return Agreement(frozenset(deviating if deviating < digests.keys() else outvoted))
    if changed and changed < digests.keys():
        return Agreement(frozenset(changed))
    return Agreement(disputed=everybody)
