"""Islands: groups of machines that train in lockstep and average their weights with other islands every H steps.

Each island trains on a part of the batch. All islands average their weights every H steps over a ring (DiLoCo,
Douillard et al., 2023) ::

    synchronisation  = max over the links of the ring of
                       (2 * (n - 1) / n * weight bytes / bandwidth + 2 * (n - 1) * latency), for n islands
    samples a second = H * batch / (H * slowest island's step + synchronisation)

These partitions are tried: each level of a single-linkage clustering of the regions, and the partition into single
machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from share_compute.models.profiles.profile import FLOAT_BYTES
from share_compute.planning.cost.cost import TrainingCost, fill_shares
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.network.network import Network, transfer_s
from share_compute.planning.report import IslandPlan, IslandProposal
from share_compute.planning.search.search import search

SYNCHRONISATION_SHARE = 0.05
"""Maximum share of the time that synchronisation takes, unless `MOST_STEPS` limits the interval."""
MOST_STEPS = 500
"""Longest interval between synchronisations, in steps: that of the DiLoCo paper."""
WORTH = 1.1
"""Minimum ratio of samples/s in islands to samples/s in lockstep.

It is above 1 because averaging less often lowers the progress per sample by an unknown amount.
"""
MOST_ALONE = 64
"""Maximum number of machines for which the partition into single machines is tried."""

Machines = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Island:
    """An island and its best layouts for the whole batch. Layouts number the machines of the island from 0."""

    machines: Machines
    cost: TrainingCost
    layouts: tuple[Layout, ...]
    samples_per_s: float


def propose_islands(
    cost: TrainingCost, *, lockstep_samples_per_s: float | None = None, most_islands: int = 8
) -> IslandProposal | None:
    """Return the fastest partition into islands that was tried.

    Return None if no partition is more than `WORTH` times as fast as lockstep over all machines. Jobs with slices of
    sequences have no proposal, because branches compute whole sequences.

    Args:
        cost: the job on all machines.
        lockstep_samples_per_s: samples/s of one plan for all machines; None searches for that plan.
        most_islands: maximum number of islands; it does not limit the partition into single machines.
    """
    if cost.workload.slices > 1:
        return None
    best: IslandProposal | None = None
    known: dict[Machines, _Island | None] = {}

    def island(machines: Machines) -> _Island | None:
        if machines not in known:
            known[machines] = _plan(cost, machines)
        return known[machines]

    if lockstep_samples_per_s is None:
        whole = island(tuple(range(cost.num_machines)))
        lockstep_samples_per_s = whole.samples_per_s if whole else 0.0
    for cut in _ways_to_cut(cost.network, cost.num_machines, most_islands):
        islands = [made for machines in cut if (made := island(machines)) is not None]
        proposal = _propose(cost, islands)
        if proposal is not None and (best is None or proposal.samples_per_s > best.samples_per_s):
            best = proposal
    return best if best is not None and best.samples_per_s > WORTH * lockstep_samples_per_s else None


def interval(step_s: float, synchronisation_s: float) -> int:
    """Return the smallest interval at which synchronisation takes at most `SYNCHRONISATION_SHARE` of the time.

    The interval is in steps, from 1 to `MOST_STEPS`.
    """
    if synchronisation_s <= 0:
        return 1
    needed = synchronisation_s * (1 - SYNCHRONISATION_SHARE) / (SYNCHRONISATION_SHARE * step_s)
    return MOST_STEPS if needed >= MOST_STEPS else max(1, math.ceil(needed - 1e-9))


def _ways_to_cut(network: Network, machines: int, most: int) -> Iterator[list[Machines]]:
    """Yield partitions of the machines into at least two islands, from coarse to fine."""
    yield from (cut for cut in levels(network) if 2 <= len(cut) <= most)
    if 2 <= machines <= MOST_ALONE:
        yield [(machine,) for members in _members(network).values() for machine in members]


def levels(network: Network) -> list[list[Machines]]:
    """Return partitions of the machines into groups of regions, from one group to one group for each region.

    They are the levels of a single-linkage clustering: the groups with the best link between them are joined first.
    """
    groups = _members(network)
    # Each group of regions becomes one island. The ring follows the order of this list.
    level: list[tuple[int, ...]] = [(region,) for region in groups]
    found = [level]
    for one, other in _best_first(network, groups):
        places = [place for place, group in enumerate(level) if one in group or other in group]
        if len(places) == 2:
            left, right = places
            level = [*level[:left], level[left] + level[right], *level[left + 1 : right], *level[right + 1 :]]
            found.append(level)
    return [
        [tuple(sorted(machine for region in group for machine in groups[region])) for group in cut]
        for cut in reversed(found)
    ]


def _members(network: Network) -> dict[int, list[int]]:
    """Return the machines of each region, in the order of the regions."""
    groups: dict[int, list[int]] = {}
    for machine, region in enumerate(network.region.tolist()):
        groups.setdefault(region, []).append(machine)
    return dict(sorted(groups.items()))


def _best_first(network: Network, regions: Iterable[int]) -> list[tuple[int, int]]:
    """Return all pairs of regions, the highest bandwidth first; ties go to the lower latency."""
    return sorted(
        combinations(regions, 2),
        key=lambda pair: (-network.bytes_per_s[pair], network.latency_s[pair], pair),
    )


def _link(network: Network, ours: Iterable[int], theirs: Iterable[int]) -> tuple[float, float]:
    """Return (latency in s, bytes/s) of the link with the highest bandwidth between two groups of regions."""
    links = [(float(network.latency_s[a, b]), float(network.bytes_per_s[a, b])) for a in ours for b in theirs]
    return max(links, key=lambda link: (link[1], -link[0]))


def _plan(cost: TrainingCost, machines: Machines) -> _Island | None:
    """Search layouts for one island; return None if no layout fits into memory with a finite step time."""
    part = cost.part(machines)
    layouts = tuple(found.layout for found in search(part, finalists=3) if part.fits(found.layout))
    if not layouts:
        return None
    step_s = min(simulate_step(part, layout).step_s for layout in layouts)
    return _Island(machines, part, layouts, cost.workload.batch_size / step_s) if step_s < math.inf else None


def _propose(cost: TrainingCost, islands: Sequence[_Island]) -> IslandProposal | None:
    """Return a proposal that splits the batch among these islands.

    Return None for fewer than two islands, for fewer microbatches than islands, or for a ring with a dead link.
    """
    count, total = len(islands), cost.workload.microbatches
    if count < 2 or total < count:
        return None
    shares = fill_shares([1 / island.samples_per_s for island in islands], total, least=1)
    assert shares is not None  # each island gets at least one microbatch
    planned = [
        _with_share(island, share, cost.workload.microbatch_size)
        for island, share in zip(islands, shares, strict=True)
    ]
    slowest_s = max(plan.step_s for plan in planned)
    synchronisation_s = _ring_s(cost, islands)
    if not math.isfinite(synchronisation_s):
        return None
    steps = interval(slowest_s, synchronisation_s)
    return IslandProposal(
        islands=tuple(planned),
        interval_steps=steps,
        synchronisation_s=synchronisation_s,
        samples_per_s=steps * cost.workload.batch_size / (steps * slowest_s + synchronisation_s),
    )


def _with_share(island: _Island, microbatches: int, microbatch_size: float) -> IslandPlan:
    workload = replace(
        island.cost.workload, batch_size=round(microbatches * microbatch_size), microbatches=microbatches
    )
    cost = replace(island.cost, workload=workload)
    # An island may have fewer microbatches than a stage has members. Members without a microbatch are left out.
    layouts = [_reshared(cost, layout) for layout in island.layouts]
    step_s, layout = min((simulate_step(cost, layout).step_s, layout) for layout in layouts)
    return IslandPlan(
        machines=tuple(cost.topology.contributors[machine].id for machine in layout.machines),
        stages=len(layout.stages),
        step_s=step_s,
        samples_per_s=workload.batch_size / step_s,
    )


def _reshared(cost: TrainingCost, layout: Layout) -> Layout:
    stages = []
    for stage in layout.stages:
        members = sorted(
            stage.members, key=lambda member: (cost.cell_s(member, stage.start, stage.stop), member)
        )
        while (shares := cost.shares(members, stage.start, stage.stop)) is None:
            members.pop()
        stages.append(StageLayout(stage.start, stage.stop, tuple(members), shares))
    return Layout(tuple(stages))


def _ring_s(cost: TrainingCost, islands: Sequence[_Island]) -> float:
    """Return the time in seconds to average all weights over a ring of islands."""
    count = len(islands)
    regions = [{int(region) for region in island.cost.network.region} for island in islands]
    size = cost.profile.parameters * FLOAT_BYTES * 2 * (count - 1) / count
    links = [_link(cost.network, regions[one], regions[(one + 1) % count]) for one in range(count)]
    return max(transfer_s(2 * (count - 1) * latency_s, rate, size) for latency_s, rate in links)
