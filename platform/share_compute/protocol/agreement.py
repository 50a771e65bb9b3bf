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

    Args:
        digests: of the reduced gradient, by member of the stage.
        before: the first answers, where the step was computed again since no majority was found; else empty.
    """
    (common, votes), *_ = Counter(digests.values()).most_common(1)
    changed = {worker for worker in before.keys() & digests.keys() if before[worker] != digests[worker]}
    if 2 * votes > len(digests):
        outvoted = {worker for worker, digest in digests.items() if digest != common}
        deviating = outvoted | changed
        return Agreement(frozenset(deviating if deviating < digests.keys() else outvoted))
    if changed and changed < digests.keys():
        return Agreement(frozenset(changed))
    return Agreement(disputed=frozenset(digests))
