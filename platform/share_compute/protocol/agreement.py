"""Finds the members of a stage whose reduced gradient deviates, by comparing digests of the gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from share_compute.protocol.membership import Worker


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of comparing the digests of one stage.

    Args:
        deviating: members whose gradient is wrong.
        disputed: all members that gave a digest, if digests do not show which gradient is wrong; else empty.
    """

    deviating: frozenset[Worker] = frozenset()
    disputed: frozenset[Worker] = frozenset()


def compare(digests: Mapping[Worker, str], before: Mapping[Worker, str]) -> Agreement:
    """Return the members of a stage whose gradient is wrong or disputed, by the digests of their gradients.

    A digest that more than half of the members have outvotes all other digests. Without such a majority, the step is
    computed again, and each member's new digest is compared with its first one. The same inputs give the same bits, so
    a member whose digest changed is wrong. If all members changed their digests and agree now, no member is excluded.

    The first digest of a member that was lost still counts, so the loss of one member does not decide the
    dispute.

    A member that is not in ``before`` joined later, and received its weights from a disputed member. Its
    digest can belong to a majority only while all members in ``before`` are present, and only if the digest
    is also in ``before``: any other digest may be due to the received weights. If such a member is present
    and no new digest is in ``before``, all digests stay disputed.

    Args:
        digests: digest of the reduced gradient, by member of the stage.
        before: first digest by member, if the step was computed again because there was no majority; else empty.
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
