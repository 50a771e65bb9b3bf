"""Plans islands for the branches of a job on a fleet whose machines leave and return."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.branches import (
    BranchPlace,
    contribution_bytes,
    exchange_s,
    island_topology,
    place_branches,
    rounds_of,
    uncompressed_bytes,
    update_bytes,
)
from share_compute.planning.network.regions import complete
from share_compute.planning.planner import solve, workload
from share_compute.simulation.run import flops_per_sample
from share_compute.specification import TrainJob
from share_compute.topology import HEAD, Link, Topology

_LEAST_CANDIDATES = 64
"""Minimum limit on the number of machines that the placement considers. The limit is twice the number of branches, but
not less than this."""
_MOST_SPARES = 4
"""Maximum number of spare machines of a region, and of all regions, that are tried in the place of a lost one."""


class PlannedIsland(NamedTuple):
    """A plan for an island with a given number of branches."""

    machines: tuple[int, ...]
    """Indices of the machines that hold layers."""
    step_s: float
    upload_s: float
    """Time in which all branches of the island send their contributions."""
    download_s: float
    """Time in which all branches of the island receive one update."""
    fetch_s: float
    """Time in which new members of all branches receive the weights in float32."""


class RoundSizes(NamedTuple):
    """Bytes of one branch's contribution, of the update of one merge, and of the weights in float32."""

    contribution: int
    update: int
    weights: int


class IslandPlanner:
    """The machines of a fleet: which are present and free, and plans for islands of them."""

    def __init__(self, spec: TrainJob, topology: Topology, profile: ModelProfile) -> None:
        self._spec, self._topology, self._profile = spec, topology, profile
        self._policy = rounds_of(spec.training)
        self._updates = self._policy.branches if self._policy.merges_apart else 1
        """Number of updates that a branch receives in a round."""
        self.sizes = RoundSizes(
            contribution_bytes(spec.training, profile),
            update_bytes(spec.training, profile) // self._updates,
            uncompressed_bytes(profile),
        )
        machines = topology.contributors
        self.index = {machine.id: place for place, machine in enumerate(machines)}
        self.speeds = np.array([machine.flops_per_s() for machine in machines])
        self._region = complete(topology).region
        self._links: defaultdict[str, list[Link]] = defaultdict(list)
        for link in topology.links:
            for end in (link.source, link.target):
                self._links[end].append(link)
        self._alone_s = self._times_alone()
        order = np.argsort(self._alone_s, kind="stable")
        self._ranked = [int(place) for place in order if self._alone_s[place] < inf]
        """Measured machines, those with the shortest rounds of one branch first."""
        self.is_there = np.ones(len(machines), dtype=bool)
        self.is_used = np.zeros(len(machines), dtype=bool)
        self._known: dict[tuple[tuple[int, ...], int], PlannedIsland | None] = {}
        self.searches = 0

    def first_places(self) -> list[tuple[PlannedIsland, int]]:
        """Return the plans of the islands of the first placement, each with its number of branches.

        Raises:
            PlanInfeasible: the machines cannot hold all branches.
        """
        few = self._candidates(max(_LEAST_CANDIDATES, 2 * self._policy.branches))
        try:
            places = place_branches(self._spec, self._part(few), self._profile)
        except PlanInfeasible:
            if len(few) == len(self._ranked):
                raise
            places = place_branches(self._spec, self._part(self._ranked), self._profile)
        if self._spec.training.boundary_compression.name != "none":
            island = island_topology(self._topology, places[0])
            first = solve(self._spec, island, self._profile, 0, {}).plan
            self._spec = self._spec.with_first_boundaries(first.boundaries)
        found = []
        for place in places:
            planned = self.plan([self.index[machine] for machine in place.machines], len(place.branches))
            assert planned is not None  # `place_branches` found a layout for the island
            found.append((planned, len(place.branches)))
        return found

    def _times_alone(self) -> NDArray[np.float64]:
        """Estimate a round of one branch on each machine alone, from its step time and its link to the server.

        The time is infinite for machines whose speed was not measured.
        """
        training, profile = self._spec.training, self._profile
        samples = self._policy.every * training.batch_size
        flops = samples * flops_per_sample(profile, workload(self._spec, 1).sequence_length)
        moved = self.sizes.contribution + self._updates * self.sizes.update
        rates = np.zeros(len(self.speeds))
        for link in self._links[HEAD]:
            end = self.index.get(link.target if link.source == HEAD else link.source)
            if end is not None:
                rates[end] = max(rates[end], link.bytes_per_s)
        rates[rates == 0] = rates[rates > 0].min(initial=inf)
        with np.errstate(divide="ignore"):
            times: NDArray[np.float64] = flops / self.speeds + moved / rates
        return times

    def _candidates(self, most: int) -> list[int]:
        """Return up to ``most`` machines: half are the best of all, half the best of each region in turn."""
        if len(self._ranked) <= most:
            return sorted(self._ranked)
        chosen = dict.fromkeys(self._ranked[: most // 2])
        seen: Counter[int] = Counter()
        turns = []
        for machine in self._ranked:
            region = int(self._region[machine])
            turns.append((seen[region], machine))
            seen[region] += 1
        for _, machine in sorted(turns, key=lambda one: (one[0], self._alone_s[one[1]], one[1])):
            if len(chosen) >= most:
                break
            chosen[machine] = None
        return sorted(chosen)

    def plan(self, machines: Iterable[int], branches: int) -> PlannedIsland | None:
        """Return a plan for some branches on these machines; None if they cannot hold the branches."""
        key = tuple(sorted(machines)), branches
        if key not in self._known:
            self._known[key] = self._search(*key)
        return self._known[key]

    def _search(self, machines: Sequence[int], branches: int) -> PlannedIsland | None:
        self.searches += 1
        names = tuple(self._topology.contributors[machine].id for machine in machines)
        part = self._part(machines)
        place = BranchPlace(names, tuple(range(branches)), 0.0)
        try:
            plan = solve(self._spec, island_topology(part, place), self._profile, 0, {}).plan
        except PlanInfeasible:
            return None
        if plan.prediction is None:
            return None
        used = sorted(plan.machines, key=self.index.__getitem__)
        upload_s, download_s, fetch_s = (exchange_s(part, used, branches * size) for size in self.sizes)
        return PlannedIsland(
            tuple(self.index[machine] for machine in used),
            plan.prediction.step_s,
            upload_s,
            download_s,
            fetch_s,
        )

    def _part(self, machines: Sequence[int]) -> Topology:
        contributors = tuple(self._topology.contributors[machine] for machine in machines)
        links = {link: None for machine in contributors for link in self._links[machine.id]}
        return Topology(contributors, tuple(links))

    def replaced(self, machines: Sequence[int], branches: int, near: int) -> PlannedIsland | None:
        """Return a plan for the remaining machines of an island, with spare machines where needed.

        Args:
            machines: machines of the island that are present.
            branches: number of its branches.
            near: the lost machine, in whose region spares are preferred.
        """
        spares = self._spares(near)
        tried = [[*machines, spare] for spare in spares] + ([list(machines)] if machines else [])
        found = [planned for one in tried if (planned := self.plan(one, branches)) is not None]
        if found:
            return min(found, key=lambda planned: self.round_s(planned, branches))
        for count in range(2, len(spares) + 1):
            planned = self.plan((*machines, *spares[:count]), branches)
            if planned is not None:
                return planned
        return None

    def round_s(self, planned: PlannedIsland, branches: int) -> float:
        """Return the time of a round of an island."""
        download_s = self._updates * planned.download_s
        return branches * self._policy.every * planned.step_s + planned.upload_s + download_s

    def _spares(self, near: int) -> list[int]:
        """Return free machines: the best overall, and the best in the region of a lost machine."""
        free = [one for one in self._ranked if self.is_there[one] and not self.is_used[one]]
        near_by = [one for one in free if self._region[one] == self._region[near]]
        return list(dict.fromkeys((*near_by[:_MOST_SPARES], *free[:_MOST_SPARES])))
