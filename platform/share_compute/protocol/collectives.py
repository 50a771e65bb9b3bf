"""Routes by which the members of a stage sum their gradients, with the additions in the order of the job's tree.

An algorithm cuts a tensor into equal shares. Each share has a route: partial sums travel up to one member, the root,
which completes the sum, and the sum travels down to all others. A member adds received partial sums to its own as far
as the summation tree allows, and sends the remaining partial sums. So neither the order of additions nor the bits
depend on the algorithm.

- ``sharded``: each member is the root of one share, and exchanges it directly with all others.
- ``ring``: each member is the root of one share, which goes around a ring twice: to be summed, and to be distributed.
  If the tree does not add the sums of neighbours on the ring to each other, a member sends several partial sums.
- ``tree``: one share; members are paired as in the summation tree, so that each sends one partial sum.
- ``hierarchical``: each site adds up its sums in a tree with the site's representative at its root. Representatives
  exchange the sums of sites directly, as in ``sharded``. No other member sends to another site.

The phases are those of the algorithms with these names in Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005. Only the places of the additions differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from share_compute.protocol.tree import Node, SummationTree

Algorithm: TypeAlias = Literal["ring", "tree", "sharded", "hierarchical"]
ALGORITHMS: Final[tuple[Algorithm, ...]] = get_args(Algorithm)
Held: TypeAlias = Sequence[Sequence[Node]]
"""Nodes of the summation tree whose sums each member has, by rank. Together they cover the tree exactly once."""
Traffic: TypeAlias = Mapping[tuple[int, int], float]
"""Data that one rank sends to another, in multiples of the size of the tensor."""


class Route(NamedTuple):
    """The route of one share."""

    root: int
    """Rank that completes the sum."""
    up: tuple[int, ...]
    """Rank to which each rank sends its partial sums; for the root, the root itself."""
    down: tuple[int, ...]
    """Rank from which each rank receives the sum; for the root, the root itself."""


class Merge(NamedTuple):
    """The additions that some partial sums allow."""

    additions: tuple[tuple[int, int], ...]
    """(left, right) summands of each addition, as places in the list of partial sums. The sum replaces the left one."""
    kept: tuple[tuple[Node, int], ...]
    """Partial sums that are left, and their places; ordered by node."""


class Part(NamedTuple):
    """The work of one rank on one route.

    Its partial sums are listed in this order: its own, as in `Held`, then those that arrive.
    """

    arriving: tuple[tuple[int, int], ...]
    """(rank, number of partial sums) of each member that sends to this one."""
    merge: Merge
    up: int | None
    """Rank to which this one sends its partial sums; None for the root."""
    down: int | None
    """Rank from which this one receives the sum; None for the root."""
    receivers: tuple[int, ...]
    """Ranks to which this one sends the sum."""
    up_tick: int
    """Position of the additions in the order of work: after those of all members that send to this one."""
    down_tick: int
    """Position in the order of work at which the sum is there."""


def merge(tree: SummationTree, nodes: Sequence[Node]) -> Merge:
    """Return the additions that the tree allows among these partial sums."""
    additions: list[tuple[int, int]] = []
    place = {node: number for number, node in enumerate(nodes)}
    held: set[Node] = set()
    for new in nodes:
        added = new
        for left, right, parent in tree.merges(held, new):
            additions.append((place[left], place[right]))
            place[parent] = place[left]
            held -= {left, right}
            added = parent
        held.add(added)
    return Merge(tuple(additions), tuple((node, place[node]) for node in sorted(held)))


def exchanges_directly(algorithm: Algorithm, sites: Sequence[int]) -> bool:
    """Return whether an algorithm is ``sharded``, or the same as ``sharded`` because all members are at one site."""
    return algorithm == "sharded" or (algorithm == "hierarchical" and len(set(sites)) == 1)


def routes(algorithm: Algorithm, held: Held, tree: SummationTree, sites: Sequence[int]) -> tuple[Route, ...]:
    """Return the route of each share.

    Args:
        algorithm: the algorithm.
        held: nodes of the partial sums of each rank.
        tree: order of the sum.
        sites: number of the site of each rank; ``tree`` and ``sharded`` do not use it.
    """
    ranks = range(len(held))
    if algorithm == "ring":
        return tuple(_around(sites, root) for root in ranks)
    if algorithm == "tree":
        root, up = _along(tree, held, ranks)
        ordered = tuple(up.get(rank, root) for rank in ranks)
        return (Route(root, ordered, ordered),)
    if exchanges_directly(algorithm, sites):
        return tuple(Route(rank, (rank,) * len(ranks), (rank,) * len(ranks)) for rank in ranks)
    return _by_sites(tree, held, sites)


def spread(algorithm: Algorithm, sites: Sequence[int]) -> tuple[Route, ...]:
    """Return, for each rank, the route by which its tensor reaches all other ranks; ``up`` is unused.

    Compressed sums use these routes: each member decodes the sums of all runs, so nothing is added on the way.
    """
    found = []
    order = by_site(sites)
    place = {rank: number for number, rank in enumerate(order)}
    count = len(sites)
    first = {sites[rank]: rank for rank in reversed(range(count))}
    for root in range(count):
        down = [root] * count
        for rank in range(count):
            distance = (place[rank] - place[root]) % count
            if rank == root or algorithm == "sharded":
                continue
            if algorithm == "ring":
                down[rank] = order[place[rank] - 1]
            elif (
                algorithm == "tree"
            ):  # a binomial tree: the parent's distance is this distance without its lowest set bit
                down[rank] = order[(place[root] + (distance & (distance - 1))) % count]
            elif sites[rank] != sites[root]:
                own = first[sites[rank]]
                down[rank] = own if rank != own else first[sites[root]]
        found.append(Route(root, tuple(down), tuple(down)))
    return tuple(found)


def parts_of(route: Route, held: Held, tree: SummationTree) -> tuple[Part, ...]:
    """Return the work of each rank on a route."""
    senders, receivers = _inverse(route.up), _inverse(route.down)
    sent: dict[int, Merge] = {}
    found: dict[int, Part] = {}
    ticks: dict[int, int] = {}
    outwards = _outwards(route.root, senders)
    for rank in reversed(outwards):
        arriving = tuple((one, len(sent[one].kept)) for one in senders[rank] if sent[one].kept)
        nodes = [*held[rank], *(node for one, _ in arriving for node, _ in sent[one].kept)]
        sent[rank] = merge(tree, nodes)
        ticks[rank] = max((ticks[one] + 1 for one in senders[rank]), default=0)
        is_root = rank == route.root
        found[rank] = Part(
            arriving,
            sent[rank],
            None if is_root else route.up[rank],
            None if is_root else route.down[rank],
            tuple(receivers[rank]),
            ticks[rank],
            0,
        )
    done = {route.root: ticks[route.root]}
    for rank in _outwards(route.root, receivers)[1:]:
        done[rank] = done[route.down[rank]] + 1
    return tuple(found[rank]._replace(down_tick=done[rank]) for rank in range(len(held)))


def traffic(found: Iterable[Sequence[Part]]) -> Traffic:
    """Return the data that each rank sends to each other rank, for the parts of all routes of a tensor."""
    shares = list(found)
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for share in shares:
        for rank, part in enumerate(share):
            for source, count in part.arriving:
                sent[source, rank] += count / len(shares)
            for receiver in part.receivers:
                sent[rank, receiver] += 1 / len(shares)
    return sent


def spread_traffic(found: Iterable[Route]) -> Traffic:
    """Return the number of tensors that each rank sends to each other rank, if every rank has one tensor for all."""
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for route in found:
        for rank, source in enumerate(route.down):
            if rank != route.root:
                sent[source, rank] += 1
    return sent


def _inverse(parents: Sequence[int]) -> list[list[int]]:
    """Return, for each rank, the ranks whose parent it is."""
    children: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent != rank:
            children[parent].append(rank)
    return children


def _outwards(root: int, children: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks of a tree, each after its parent."""
    found = [root]
    for rank in found:
        found += children[rank]
    return found


def by_site(sites: Sequence[int]) -> list[int]:
    """Return the ranks ordered by site."""
    return sorted(range(len(sites)), key=lambda rank: (sites[rank], rank))


def _around(sites: Sequence[int], root: int) -> Route:
    """Return the route of one share of a ring. The ring visits one site after the other."""
    order = by_site(sites)
    after = dict(zip(order, [*order[1:], order[0]], strict=True))
    before = {other: one for one, other in after.items()}
    ranks = range(len(sites))
    up = tuple(root if rank == root else after[rank] for rank in ranks)
    return Route(root, up, tuple(root if rank == root else before[rank] for rank in ranks))


def _along(tree: SummationTree, held: Held, ranks: Sequence[int]) -> tuple[int, dict[int, int]]:
    """Return the root of a tree of these ranks along the summation tree, and the parent of each other rank.

    At each node of the summation tree, the first member with a part of the right summand sends to the first member with
    a part of the left one. Members without parts receive the sum from the root.
    """
    holders = sorted((held[rank][0], rank) for rank in ranks if held[rank])
    root = holders[0][1] if holders else ranks[0]
    up = {rank: root for rank in ranks if rank != root}
    open_ = [(tree.root, holders)]
    while open_:
        node, inside = open_.pop()
        children = tree.children(node)
        if len(inside) < 2 or children is None:
            continue
        left = [each for each in inside if each[0].start < children[0].stop]
        right = inside[len(left) :]
        if left and right:
            up[right[0][1]] = left[0][1]
        open_ += [(children[0], left), (children[1], right)]
    return root, up


def _by_sites(tree: SummationTree, held: Held, sites: Sequence[int]) -> tuple[Route, ...]:
    """Return routes that lead along the summation tree inside each site, and then between representatives."""
    groups: dict[int, list[int]] = {}
    for rank, site in enumerate(sites):
        groups.setdefault(site, []).append(rank)
    inside = {site: _along(tree, held, ranks) for site, ranks in groups.items()}
    found = []
    for root_site in _root_sites(tree, held, groups):
        root = inside[root_site][0]
        parents: dict[int, int] = {}
        for representative, up in inside.values():
            parents |= {**up, representative: root}
        ordered = tuple(parents[rank] for rank in range(len(held)))
        found.append(Route(root, ordered, ordered))
    return tuple(found)


def _root_sites(tree: SummationTree, held: Held, groups: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """Return the sites that complete shares: all sites, or only one if this reduces the traffic of the busiest site.

    If the members of a site have parts of different subtrees, the site would send several partial sums. Traffic is then
    less if this site completes the sum.
    """
    counts = {
        site: len(merge(tree, [node for rank in ranks for node in held[rank]]).kept)
        for site, ranks in groups.items()
    }
    total, others = sum(counts.values()), len(groups) - 1
    results = others / len(groups)
    shared = max(max(count * results, (total - count) / len(groups)) + results for count in counts.values())
    chosen: Sequence[int] = tuple(groups)
    for root in groups:
        busiest = max(others, total - counts[root], *(counts[site] for site in groups if site != root), 1)
        if busiest < shared - 1e-9:
            chosen, shared = (root,), busiest
    return chosen
