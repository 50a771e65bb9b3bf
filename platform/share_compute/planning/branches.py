"""Places the branches of a job on islands: machines with fast links that train a branch together.

The predicted time of a round with H steps is ::

    round     = max over islands of (branches * H * step + exchange, as far as it does not overlap with steps)
    step      = time of one step of one branch on the island, as if the branch were alone there
    exchange  = 2 * latency + branches * (contribution bytes + update bytes) / bandwidth, to the server

The branches of an island share its machines. Each branch may use an equal part of each machine's memory.

Candidates for the islands are the levels of a clustering of the machines by their links (`planning.islands.levels`),
equal parts of the machines in the order of that clustering, and all single machines. For each candidate, branches are
placed one after the other, each on the island that completes its round first with it. That minimises the time of the
round, because this time grows with the number of branches. Islands without a branch are left out. Ties go to fewer
islands, then to fewer machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heapreplace
from itertools import product

from share_compute.compression.codec import Codec
from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import LayerProfile, ModelProfile
from share_compute.planning.cost.tables import MEMORY_SHARE
from share_compute.planning.cost.timings import Timings
from share_compute.planning.explain.infeasible import infeasible
from share_compute.planning.islands import MOST_ALONE, Machines, levels
from share_compute.planning.network.network import transfer_s
from share_compute.planning.network.regions import complete
from share_compute.planning.plan import NOT_MEASURED, IdleMachine
from share_compute.planning.planner import search_problems
from share_compute.planning.search.choice import Choice, Proposal, least_penalized, rounded
from share_compute.planning.search.partitioning import load_strategy
from share_compute.planning.search.strategies import AutoPartitioning, is_measured
from share_compute.planning.search.thorough import proposed, simple
from share_compute.specification import TrainJob
from share_compute.specification.boundaries import PlannedBoundaryCompressionSpec
from share_compute.specification.synchronization import BranchesSpec
from share_compute.specification.training import TrainingSpec
from share_compute.topology import HEAD, Link, Topology, absurdities

_SMALL = 8
"""Maximum number of machines of an island for which dynamic programming is tried; it is slow for more machines."""
_MOST_LEVELS = 32
"""Maximum number of levels of the clustering that are tried; of more levels, some at even intervals are tried."""
NO_BRANCH = "rounds would not be shorter if it trained a branch"


@dataclass(frozen=True, slots=True)
class BranchPlace:
    """An island, and the branches that its machines train."""

    machines: tuple[str, ...]
    """Contributor ids of the island's machines, in the order of the topology."""
    branches: tuple[int, ...]
    """Numbers of the branches, ascending."""
    step_s: float
    """Predicted time of one step of one branch that is alone on the island.

    If no machine's speed was measured, it holds for an assumed speed.
    """


def place_branches(
    job: TrainJob, topology: Topology, profile: ModelProfile, timings: Timings | None = None
) -> tuple[BranchPlace, ...]:
    """Return islands and their branches, chosen for short rounds; equal arguments give equal results.

    Machines without a branch are in no island; `idle_machines` lists them.

    Args:
        job: a job with branches.
        topology: the machines that the job may use, the links between them, and their links to the server.
        profile: cost profile of the job's model.
        timings: measured times of layers, which replace estimates.

    Raises:
        PlanInfeasible: the machines cannot hold the model once for each branch.
        UserError: the model has no parameters, or there is no such strategy.
        ValueError: the job has no branches.
    """
    branches = rounds_of(job.training).branches
    if job.training.boundary_compression.name == "auto":  # the choice is hardly slower than int8
        job = job.with_boundaries(PlannedBoundaryCompressionSpec(name="int8"))
    islands = _Islands(job, topology, profile, timings or {})
    best: tuple[tuple[float, int, int], list[_Share]] | None = None
    most = 0
    for cut in islands.cuts(branches):
        shares = _shared(cut, branches)
        placed = sum(share.branches for share in shares)
        most = max(most, placed)
        if placed < branches:
            continue
        machines = sum(len(share.island.machines) for share in shares)
        rank = rounded(max(share.round_s for share in shares)), len(shares), machines
        if best is None or rank < best[0]:
            best = rank, shares
    if best is None:
        raise _infeasible(job, topology, profile, timings or {}, most)
    return _numbered(islands.topology, best[1])


def idle_machines(topology: Topology, places: Iterable[BranchPlace]) -> tuple[IdleMachine, ...]:
    """Return the machines that are in no island, with the reasons."""
    used = {machine for place in places for machine in place.machines}
    some_measured = any(map(is_measured, topology.contributors))
    return tuple(
        IdleMachine(
            contributor_id=machine.id,
            name=machine.name,
            reason=NOT_MEASURED if some_measured and not is_measured(machine) else NO_BRANCH,
        )
        for machine in topology.contributors
        if machine.id not in used
    )


def island_topology(topology: Topology, place: BranchPlace) -> Topology:
    """Return the machines of an island, each with the memory that one of its branches may use.

    Links between the island's machines, and between them and the server, are kept.
    """
    return _part(topology, place.machines, len(place.branches))


def can_hold(job: TrainJob, topology: Topology, profile: ModelProfile) -> bool:
    """Return whether the machines can hold the job's model once, with the strategy that the job names."""
    return bool(_fastest(job, topology, profile, {}))


def neighbours(topology: Topology, places: Sequence[BranchPlace]) -> list[tuple[int, int]]:
    """Return the edges of a graph of the branches that prefers fast links; each edge has the smaller number first.

    The edges are a minimum spanning tree by latency, which joins all branches, and an edge from each branch to its
    nearest other branch. Branches of one island have distance 0. Pairs without a measured link count as farthest.
    """
    island = {number: place for place in places for number in place.branches}
    latencies: dict[tuple[str, str], float] = {}
    for link in topology.links:
        if not link.is_dead and not any(absurdities(link)):
            latencies[link.source, link.target] = link.latency_s

    @cache
    def between(one: tuple[str, ...], other: tuple[str, ...]) -> float:
        pairs = [*product(one, other), *product(other, one)]
        return min((latencies[pair] for pair in pairs if pair in latencies), default=math.inf)

    def distance(one: int, other: int) -> float:
        here, there = island[one], island[other]
        return 0.0 if here is there else between(here.machines, there.machines)

    numbers = sorted(island)
    edges = set[tuple[int, int]]()
    for one in numbers[1:]:
        nearest = min((distance(one, other), other) for other in numbers if other != one)[1]
        edges.add((min(one, nearest), max(one, nearest)))
    joined = dict.fromkeys(numbers[1:], numbers[0])
    while joined:
        _, new = min((distance(end, number), number) for number, end in joined.items())
        edges.add((min(new, joined[new]), max(new, joined.pop(new))))
        for number, end in joined.items():
            if distance(new, number) < distance(end, number):
                joined[number] = new
    return sorted(edges)


def contribution_bytes(training: TrainingSpec, profile: ModelProfile) -> int:
    """Return the approximate bytes of one branch's contribution, as the codec of the last round writes it.

    The profile has the number of trained parameters of each layer, but not the shapes of its tensors. Each layer is
    therefore counted as nearly square matrices of the size of its largest tensor.
    """
    return _bytes(codec_of_round(training, _last_round(training)), profile)


def update_bytes(training: TrainingSpec, profile: ModelProfile) -> int:
    """Return the approximate bytes of updates that a branch receives in a round, counted as in `contribution_bytes`.

    Branches that push one after another to a parameter server may receive an update for the push of each branch.
    """
    policy = rounds_of(training)
    versions = policy.branches if policy.merges_apart else 1
    # Branches with their own weights receive the result of the last round without compression.
    last = max(1, _last_round(training) - policy.keeps_own_weights)
    return versions * _bytes(codec_of_update(training, last * versions), profile)


def uncompressed_bytes(profile: ModelProfile) -> int:
    """Return the bytes of all trained parameters in float32."""
    return 4 * trained_parameters(profile)


def trained_parameters(profile: ModelProfile) -> int:
    """Return the number of trained parameters of the whole model."""
    return sum(
        layer.parameters - layer.frozen for layer in (profile.embedding, *profile.layers, profile.head)
    )


def round_s(policy: BranchesSpec, branches: int, step_s: float, exchanged_s: float) -> float:
    """Return the predicted seconds of a round on an island.

    Args:
        policy: options of the policy.
        branches: number of branches on the island.
        step_s: time of one step of one branch.
        exchanged_s: time of the exchange with the server.
    """
    hidden_s = branches * policy.overlapping * step_s
    return branches * policy.every * step_s + max(0.0, exchanged_s - hidden_s)


def exchange_s(topology: Topology, machines: Sequence[str], size_bytes: float) -> float:
    """Return the predicted seconds in which an island exchanges bytes with the server, both ways together.

    The slowest link between the island's machines and the server counts. If no such link was measured, the slowest
    usable link of the island's machines counts instead; without any link the time is 0.
    """
    ours = set(machines)
    known = [
        link for link in topology.links if not any(absurdities(link)) and ours & {link.source, link.target}
    ]
    links = [link for link in known if HEAD in (link.source, link.target)] or [
        link for link in known if not link.is_dead
    ]
    return _slowest_s(links, size_bytes)


def _slowest_s(links: Sequence[Link], size_bytes: float) -> float:
    if not links:
        return 0.0
    latency_s = max(link.latency_s for link in links)
    return transfer_s(2 * latency_s, min(link.bytes_per_s for link in links), size_bytes)


def rounds_of(training: TrainingSpec) -> BranchesSpec:
    """Return the policy by which the branches of a job merge; raise `ValueError` if it has no branches."""
    if training.rounds is None:
        raise ValueError(f"a job with synchronization {training.synchronization.kind} has no branches")
    return training.rounds


def _last_round(training: TrainingSpec) -> int:
    return rounds_of(training).rounds(training.steps)


def _bytes(codec: Codec, profile: ModelProfile) -> int:
    return sum(_layer_bytes(codec, layer) for layer in (profile.embedding, *profile.layers, profile.head))


def _layer_bytes(codec: Codec, layer: LayerProfile) -> int:
    trained = layer.parameters - layer.frozen
    if trained == 0:
        return 0
    size = min(layer.largest or trained, trained)
    whole, rest = divmod(trained, size)
    return whole * _tensor_bytes(codec, size) + _tensor_bytes(codec, rest)


def _tensor_bytes(codec: Codec, size: int) -> int:
    """Return the bytes of ``size`` values: a nearly square matrix, and a vector of the remaining values."""
    rows = math.isqrt(size)
    if rows < 2:
        return codec.num_bytes((size,)) if size else 0
    columns, rest = divmod(size, rows)
    return codec.num_bytes((rows, columns)) + (codec.num_bytes((rest,)) if rest else 0)


def _part(topology: Topology, machines: Iterable[str], branches: int) -> Topology:
    kept = set(machines)
    ends = kept | {HEAD}
    contributors = tuple(
        replace(
            machine,
            devices=tuple(
                replace(device, memory_bytes=device.memory_bytes // branches) for device in machine.devices
            ),
        )
        for machine in topology.contributors
        if machine.id in kept
    )
    links = tuple(link for link in topology.links if link.source in ends and link.target in ends)
    return Topology(contributors, links)


class _Island:
    """Predicts the time of a step and of a round on one island, for each number of branches."""

    def __init__(
        self, job: TrainJob, topology: Topology, profile: ModelProfile, timings: Timings, size_bytes: int
    ) -> None:
        self.machines = tuple(machine.id for machine in topology.contributors)
        self._job, self._topology, self._profile, self._timings = job, topology, profile, timings
        self._size_bytes = size_bytes
        """Bytes that each branch sends and receives in a round."""
        self._step_s: list[float] = []
        """Step times for 1, 2, ... branches."""
        self._until = 0
        """Largest number of branches for which the last planned layout fits."""

    def round_s(self, branches: int) -> float:
        """Return the time of a round in seconds; infinite if the memory does not suffice."""
        exchanged_s = exchange_s(self._topology, self.machines, branches * self._size_bytes)
        return round_s(rounds_of(self._job.training), branches, self.step_s(branches), exchanged_s)

    def step_s(self, branches: int) -> float:
        """Return the time of one step of one branch; infinite if the memory does not suffice."""
        while len(self._step_s) < branches:
            count = len(self._step_s) + 1
            before_s = self._step_s[-1] if self._step_s else 0.0
            # Less memory only excludes layouts: the fastest layout stays the fastest as long as it fits.
            keeps = count <= self._until or math.isinf(before_s)
            self._step_s.append(before_s if keeps else self._plan(count))
        return self._step_s[branches - 1]

    def _plan(self, branches: int) -> float:
        choice = _fastest(
            self._job, _part(self._topology, self.machines, branches), self._profile, self._timings
        )
        if not choice:
            return math.inf
        proposal, step = choice.best
        cost, layout = proposal.cost, proposal.candidate.layout
        contributors = cost.topology.contributors
        self._until = min(
            int(
                MEMORY_SHARE
                * branches
                * contributors[machine].memory_bytes
                / cost.member_bytes(layout, place, index)
            )
            for place, stage in enumerate(layout.stages)
            for index, machine in enumerate(stage.members)
        )
        return step.step_s


def _fastest(job: TrainJob, topology: Topology, profile: ModelProfile, timings: Timings) -> Choice:
    """Return a choice among simple layouts, whose search is short; empty if no layout fits into memory."""
    try:
        problems = search_problems(job, topology, profile, timings)
    except PlanInfeasible:
        return Choice()  # the model cannot be cut into the requested stages
    strategy = load_strategy(job.parallelism.strategy)
    if isinstance(strategy, AutoPartitioning):
        is_small = len(topology.contributors) <= _SMALL
        return simple(problems, in_order=problems if is_small else ())
    found: list[Proposal] = []
    for problem in problems:
        try:
            found += proposed(problem, strategy.place(problem))
        except PlanInfeasible:
            continue  # the requested stages cannot be formed on these machines
    choice = Choice()
    choice.offer(least_penalized(found))
    return choice


@dataclass(frozen=True, slots=True)
class _Share:
    """An island, and the number of its branches."""

    island: _Island
    branches: int

    @property
    def round_s(self) -> float:
        return self.island.round_s(self.branches)


class _Islands:
    """All islands that are considered for a job, each planned once."""

    def __init__(self, job: TrainJob, topology: Topology, profile: ModelProfile, timings: Timings) -> None:
        measured = tuple(machine for machine in topology.contributors if is_measured(machine))
        self.topology = replace(topology, contributors=measured) if measured else topology
        self._job, self._profile, self._timings = job, profile, timings
        self._size_bytes = contribution_bytes(job.training, profile) + update_bytes(job.training, profile)
        self._known: dict[Machines, _Island] = {}

    def cuts(self, branches: int) -> Iterator[list[_Island]]:
        """Yield partitions of the machines: at most `_MOST_LEVELS` levels, equal parts, and all single machines."""
        cuts = levels(complete(self.topology))
        order = [machine for machines in cuts[-1] for machine in machines]
        if len(cuts) > _MOST_LEVELS:
            spread = (len(cuts) - 1) / (_MOST_LEVELS - 1)
            cuts = [cuts[round(place * spread)] for place in range(_MOST_LEVELS)]
        if len(order) <= MOST_ALONE:
            counts = {branches, *(2**power for power in range(1, MOST_ALONE.bit_length()))}
            most = min(branches, len(order))
            cuts += [_equal_parts(order, count) for count in sorted(counts) if 1 < count <= most]
            cuts.append([(machine,) for machine in order])
        seen: list[list[Machines]] = []
        for cut in map(sorted, cuts):
            if cut not in seen:
                seen.append(cut)
                yield [self._island(machines) for machines in cut]

    def _island(self, machines: Machines) -> _Island:
        if machines not in self._known:
            names = [self.topology.contributors[machine].id for machine in machines]
            part = _part(self.topology, names, 1)
            self._known[machines] = _Island(self._job, part, self._profile, self._timings, self._size_bytes)
        return self._known[machines]


def _equal_parts(machines: Sequence[int], count: int) -> list[Machines]:
    """Return ``count`` parts of a list whose sizes differ by 1 at most, each in ascending order."""
    return [
        tuple(sorted(machines[part * len(machines) // count : (part + 1) * len(machines) // count]))
        for part in range(count)
    ]


def _shared(islands: Sequence[_Island], branches: int) -> list[_Share]:
    """Return the islands that get branches; fewer than ``branches`` in total if the memory does not suffice."""
    counts = [0] * len(islands)
    ready = [(rounded(island.round_s(1)), place) for place, island in enumerate(islands)]
    heapify(ready)
    for _ in range(branches):
        round_s, place = ready[0]
        if math.isinf(round_s):
            break
        counts[place] += 1
        heapreplace(ready, (rounded(islands[place].round_s(counts[place] + 1)), place))
    return [_Share(island, count) for island, count in zip(islands, counts, strict=True) if count]


def _numbered(topology: Topology, shares: Iterable[_Share]) -> tuple[BranchPlace, ...]:
    """Number the branches island by island, in the order of the islands' first machines."""
    order = {machine.id: place for place, machine in enumerate(topology.contributors)}
    places, first = [], 0
    for share in sorted(shares, key=lambda share: order[share.island.machines[0]]):
        branches = tuple(range(first, first + share.branches))
        places.append(BranchPlace(share.island.machines, branches, share.island.step_s(share.branches)))
        first += share.branches
    return tuple(places)


def _infeasible(
    job: TrainJob, topology: Topology, profile: ModelProfile, timings: Timings, most: int
) -> PlanInfeasible:
    """Return the error for machines that can hold only ``most`` branches at the same time."""
    branches = rounds_of(job.training).branches
    if most == 0:
        strategy = load_strategy(job.parallelism.strategy)
        return infeasible(strategy, search_problems(job, topology, profile, timings)[-1], None)
    return PlanInfeasible(
        f"these machines can hold {most} of the {branches} branches at the same time",
        hint=f"set training.synchronization.branches to at most {most}, let more machines join, or lend more memory",
        details={"branches": branches, "fitting_branches": most},
    )
