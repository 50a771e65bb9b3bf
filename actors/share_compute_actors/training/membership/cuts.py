"""Finds pairs of members that must communicate in an epoch, but whose hosts cannot reach each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import combinations, pairwise, product

from share_compute.errors import ContributorLost
from share_compute.protocol.membership import Membership, Worker
from share_compute.quantities import listed
from share_compute_actors.machine.reach import Place
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.wire import NAMES

Pair = tuple[Worker, Worker]


class LinksCut(ContributorLost):
    """Living members that must communicate cannot reach each other, so the job needs another plan.

    Args:
        pairs: the pairs of members.
        names: one text for each pair, with the names of both machines, for the user.
    """

    def __init__(self, pairs: Collection[Pair], names: Collection[str]) -> None:
        super().__init__(
            f"these machines do not reach each other any more: {listed(sorted(names))}",
            hint="no action needed: the job is planned around them; open the network between them to use both",
        )
        self.pairs = tuple(sorted(pairs))


def needed(membership: Membership) -> frozenset[Pair]:
    """Return the pairs of members that exchange tensors in an epoch; each pair is sorted and occurs once."""
    within = (pair for stage in membership.stages for pair in combinations(stage, 2))
    between = (pair for one, other in pairwise(membership.stages) for pair in product(one, other))
    tied = product(membership.stages[0], membership.stages[-1]) if membership.is_tied else ()
    copies = ((owner, holder) for owner in membership.workers for holder in membership.copy_holders(owner))
    pairs = (pair for group in (within, between, tied, copies) for pair in group)
    return frozenset((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1])


def require_links(group: TrainingGroup, membership: Membership) -> None:
    """Check that each member can connect to the hosts of the members that it must communicate with.

    Args:
        group: all members.
        membership: membership of the epoch.

    Raises:
        LinksCut: a member gets no answer from the host of another member. Not raised if a network cut of the
            coordinator's host ended less than 10 s ago.
        MembersLost: members died during the call.
    """
    nodes = group.nodes()
    places: dict[Worker, dict[Worker, Place]] = defaultdict(dict)
    for pair in needed(membership):
        for worker, other in (pair, pair[::-1]):
            place = nodes.get(group.topology[other].node_id)
            if place is not None and {worker, other} <= group.workers:
                places[worker][other] = place
    unresponsive = group.gather(
        NAMES, {worker: group.handle(worker).unreached.remote(others) for worker, others in places.items()}
    )
    pairs = {
        (min(worker, other), max(worker, other))
        for worker, others in unresponsive.items()
        for other in others
        if other in places[worker]
    }
    # After a cut of the coordinator's own network, some answers may be older than the end of the cut. A later check
    # decides whether the members can reach each other.
    if pairs and not group.was_cut:
        raise LinksCut(pairs, {" - ".join(sorted(map(group.name, pair))) for pair in pairs})
