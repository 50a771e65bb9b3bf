"""What the coordinator doubts about the open step: which machine made numbers that cannot be used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from share_compute.protocol.agreement import compare
from share_compute.protocol.messages import Prepared
from share_compute.protocol.roster import Roster, Worker

UNBELIEVED = "it rejected a tensor of another member again, and its word alone is taken once"
"""Why an accuser loses its place."""


def quarantines(accuser: Worker | None, earlier: Collection[Worker | None]) -> bool:
    """Return whether an offence ends the work of its machine.

    It does if there is an earlier one that does not rest on the word of the same member.

    Args:
        accuser: the member on whose word alone this offence rests; None where the coordinator knows it.
        earlier: the same of each earlier offence of the machine.
    """
    return any(one is None or one != accuser for one in earlier)


class Accusations:
    """Decides who loses its place when the word of one member is all that stands against another.

    The word of each member is taken once. The next time, the accuser itself loses its place, so a member that lies
    cannot drive out all others.
    """

    def __init__(self) -> None:
        self._taken: set[Worker] = set()

    def loser(self, source: Worker, accuser: Worker) -> Worker:
        """Return which of the two is left out; the accusation counts from now on."""
        if accuser == source or accuser not in self._taken:
            self._taken |= {accuser} - {source}
            return source
        return accuser


@dataclass
class Doubts:
    """What is known of the numbers of one step until it is committed.

    A step that is started over has a later generation. Nothing that members hold of an earlier one counts.

    The check of single members, by cells that are drawn and that another machine computes again, is to be added here:
    the two digests of such a cell are answers that `deviating` compares.
    """

    generation: int = 0
    suspect: Worker | None = None
    """Machine that made numbers that are not finite. Another one computes its cells; the step's commit proves it wrong,
    and numbers that are not finite there either prove that the model diverges."""
    what: str = ""
    """What the suspect made."""
    accuser: Worker | None = None
    """Member that says so; None where the suspect says it of itself."""
    answers: dict[tuple[Worker, tuple[int, int]], str] = field(default_factory=dict)
    """First digests of members that disagreed without a majority, by member and shard."""

    def take_answers(
        self, roster: Roster, prepared: Mapping[Worker, Prepared], workers: Collection[Worker]
    ) -> None:
        """Keep the digests of these members, to compare their next answers with."""
        self.answers = {(worker, roster.shard_of(worker)): prepared[worker].digest for worker in workers}

    def deviating(
        self, roster: Roster, prepared: Mapping[Worker, Prepared]
    ) -> tuple[frozenset[Worker], frozenset[Worker]]:
        """Return the members whose gradient is wrong, and those in dispute where it cannot be told."""
        found = []
        for shard, stage in zip(roster.shards, roster.pools, strict=True):
            before = {worker: answer for (worker, part), answer in self.answers.items() if part == shard}
            if len(stage) > 1 or before:
                found.append(compare({worker: prepared[worker].digest for worker in stage}, before))
        deviating = frozenset[Worker]().union(*(one.deviating for one in found))
        disputed = frozenset[Worker]().union(*(one.disputed for one in found))
        return deviating, disputed
