"""Finds members with a wrong gradient by comparing the digests of a stage's members."""

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
        disputed: all members that gave a digest, if it is unknown which gradient is wrong; else empty.
    """

    deviating: frozenset[Worker] = frozenset()
    disputed: frozenset[Worker] = frozenset()


def compare(digests: Mapping[Worker, str], before: Mapping[Worker, str]) -> Agreement:
    """Return the members of a stage whose gradient is wrong or disputed.

    Members outside a majority are wrong. Without a majority, the gradients are disputed, and the caller restarts the
    step. A member whose digest then differs from its first digest is wrong too, unless no member would remain. Comments
    in the function explain the rules for members that are lost or join later.

    Args:
        digests: digest of the reduced gradient, by member of the stage.
        before: first digest by member, if the step was computed again because there was no majority; else empty.
    """
    everybody = frozenset(digests.keys() | before.keys())
    gone, late = before.keys() - digests.keys(), digests.keys() - before.keys() if before else set()
    # The first digest of a lost member still counts. Otherwise the loss of a member could decide a dispute.
    voices = {
        **before,
        **{worker: digest for worker, digest in digests.items() if not (gone and worker in late)},
    }
    (common, votes), *_ = Counter(voices.values()).most_common(1)
    changed = {worker for worker in before.keys() & digests.keys() if before[worker] != digests[worker]}
    # Members that joined later received their weights from a disputed member, so these weights may be wrong.
    if late and not set(digests.values()) & set(before.values()):
        return Agreement(disputed=everybody)
    if 2 * votes > len(voices) and (not late or common in before.values()):
        outvoted = {worker for worker, digest in digests.items() if digest != common}
        deviating = outvoted | changed
        return Agreement(frozenset(deviating if deviating < digests.keys() else outvoted))
    if changed and changed < digests.keys():
        return Agreement(frozenset(changed))
    return Agreement(disputed=everybody)
