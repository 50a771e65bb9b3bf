"""The coordinator's records of numbers that may be wrong, and the rules for excluding a member because of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from share_compute.protocol.agreement import compare
from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.messages import Prepared

UNBELIEVED = "it rejected a tensor of another member again, but only one claim is believed without evidence"
"""Reason that is reported when a member is excluded for its second accusation."""


def quarantines(accuser: Worker | None, earlier: Collection[Worker | None]) -> bool:
    """Return whether an offence that is not grave (see `Blame.is_grave`) puts its machine in quarantine.

    This is the case if the machine has an earlier offence without an accuser, or with a different accuser.

    Args:
        accuser: member whose claim is the only evidence of the offence; None if there is other evidence.
        earlier: accuser of each earlier offence of the machine; None as above.
    """
    return any(one is None or one != accuser for one in earlier)


class Accusations:
    """Decides which member is excluded when one member accuses another without other evidence.

    Each member is believed once, so a faulty member can have only one other member excluded.
    """

    def __init__(self) -> None:
        self._taken: set[Worker] = set()

    def loser(self, source: Worker, accuser: Worker) -> Worker:
        """Record an accusation and return the member to exclude.

        This is ``source`` if the accuser accuses itself, or if it accuses another member for the first time.
        Otherwise it is ``accuser``.
        """
        if accuser == source or accuser not in self._taken:
            self._taken |= {accuser} - {source}
            return source
        return accuser


@dataclass
class Doubts:
    """Doubts about the numbers of one step, until the step is committed."""

    generation: int = 0
    """Number that grows with each restart of the step. Results of an earlier generation do not count."""
    suspect: Worker | None = None
    """Member whose numbers were not finite. The step is restarted without it."""
    what: str = ""
    """Human-readable description of the defect in the suspect's numbers."""
    accuser: Worker | None = None
    """Member that reported the suspect; None if the suspect reported itself."""
    answers: dict[tuple[Worker, tuple[int, int]], str] = field(default_factory=dict)
    """First digests of members that disagreed without a majority, by member and its layers [start, stop)."""

    def take_answers(
        self, membership: Membership, prepared: Mapping[Worker, Prepared], workers: Collection[Worker]
    ) -> None:
        """Replace ``answers`` by the digests of these members, for comparison with their next digests."""
        self.answers = {(worker, membership.shard_of(worker)): prepared[worker].digest for worker in workers}

    def deviating(
        self, membership: Membership, prepared: Mapping[Worker, Prepared]
    ) -> tuple[frozenset[Worker], frozenset[Worker]]:
        """Return the members whose gradient is wrong, and the members that are in dispute; see `compare`."""
        found = []
        for shard, stage in zip(membership.shards, membership.stages, strict=True):
            before = {worker: answer for (worker, part), answer in self.answers.items() if part == shard}
            if len(stage) > 1 or before:
                found.append(compare({worker: prepared[worker].digest for worker in stage}, before))
        deviating = frozenset[Worker]().union(*(one.deviating for one in found))
        disputed = frozenset[Worker]().union(*(one.disputed for one in found))
        return deviating, disputed
