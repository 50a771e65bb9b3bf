"""Causes of a step's duration: each cause is removed from the cost model, and the step is simulated without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.network.network import Network
from share_compute.planning.plan import CauseKind
from share_compute.topology import Contributor

_MOST_OF_A_KIND = 4
"""Maximum number of machines (the busiest), and of links between stages (the slowest), that are tried as causes."""
_BOUNDLESS = 1e9
"""Factor by which the speed of a machine is multiplied to remove it as a cause."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A slow machine, a slow link or a gradient sum that makes a step longer."""

    kind: CauseKind
    machines: tuple[int, ...]
    """Indices of the machine, of the two ends of the link, or of the members of the stage."""
    saved_s: float
    """Seconds by which a step would be shorter without this cause."""


def causes(cost: TrainingCost, layout: Layout, step_s: float, *, of: int | None = None) -> list[Cause]:
    """Return possible causes of a step's duration, in descending order of the seconds that each costs.

    The busiest machines, the slowest links and all gradient sums are tried.

    Args:
        cost: cost model of the job on its machines.
        layout: the stages.
        step_s: simulated time of a step in seconds.
        of: index of a machine of the layout; only causes that involve it are tried. None tries all machines.
    """
    focus = _Focus(cost, layout, of)
    found = [
        Cause(kind, machines, step_s - simulate_step(relieved, focus.layout).step_s)
        for kind, machines, relieved in focus.reliefs()
    ]
    return sorted(found, key=lambda cause: (-cause.saved_s, cause.kind, cause.machines))


class _Focus:
    """The machines of one layout, each in its own region, so that each link can be changed separately."""

    def __init__(self, cost: TrainingCost, layout: Layout, of: int | None) -> None:
        self._machines = layout.machines
        place = {machine: index for index, machine in enumerate(self._machines)}
        self._of = None if of is None else place[of]
        self.layout = layout.renumbered(place)
        chosen = [cost.topology.contributors[machine] for machine in self._machines]
        regions = cost.network.region[list(self._machines)]
        self._cost = replace(
            cost,
            topology=replace(cost.topology, contributors=tuple(chosen)),
            network=Network(
                region=np.arange(len(chosen)),
                latency_s=cost.network.latency_s[np.ix_(regions, regions)].copy(),
                bytes_per_s=cost.network.bytes_per_s[np.ix_(regions, regions)].copy(),
            ),
        )

    def reliefs(self) -> Iterator[tuple[CauseKind, tuple[int, ...], TrainingCost]]:
        """Yield (kind of cause, machines that cause it, cost tables without this cause)."""
        for machine in self._busiest():
            kind: CauseKind = "memory" if self._reads_memory(machine) else "compute"
            yield kind, (self._machines[machine],), self._with_boundless(machine)
        for before, after in self._slowest_links():
            one, other = self._worst_ends(before, after)
            ends = (self._machines[one], self._machines[other])
            yield "link", ends, self._with_links(before.members, after.members, bytes_per_s=np.inf)
            yield "latency", ends, self._with_links(before.members, after.members, latency_s=0.0)
        for stage in self.layout.stages:
            if len(stage.members) > 1 and self._of in (None, *stage.members):
                summed = self._with_links(stage.members, stage.members, bytes_per_s=np.inf, latency_s=0.0)
                yield "synchronisation", tuple(self._machines[member] for member in stage.members), summed

    def _busiest(self) -> Iterable[int]:
        if self._of is not None:
            return [self._of]
        busy_s = {
            member: share * self._cost.cell_s(member, stage.start, stage.stop)
            for stage in self.layout.stages
            for member, share in zip(stage.members, stage.shares, strict=True)
        }
        return sorted(busy_s, key=lambda member: (-busy_s[member], member))[:_MOST_OF_A_KIND]

    def _slowest_links(self) -> Sequence[tuple[StageLayout, StageLayout]]:
        neighbours = [
            (before, after)
            for before, after in pairwise(self.layout.stages)
            if self._of in (None, *before.members, *after.members)
        ]
        return sorted(neighbours, key=lambda pair: (-self._carried_s(*pair), pair[0].start))[:_MOST_OF_A_KIND]

    def _carried_s(self, before: StageLayout, after: StageLayout) -> float:
        size = float(self._cost.link_bytes[after.start])
        one, other = self._worst_ends(before, after)
        return self._cost.network.transfer_s(one, other, size)

    def _worst_ends(self, before: StageLayout, after: StageLayout) -> tuple[int, int]:
        size = float(self._cost.link_bytes[after.start])
        pairs = [
            (one, other)
            for one in before.members
            for other in after.members
            if self._of in (None, one, other)
        ]
        return max(pairs, key=lambda pair: self._cost.network.transfer_s(pair[0], pair[1], size))

    def _reads_memory(self, machine: int) -> bool:
        """Return whether a machine would compute its layers more than twice as fast if it never waited for memory."""
        contributor = self._cost.topology.contributors[machine]
        stage = next(stage for stage in self.layout.stages if machine in stage.members)
        alone = [
            replace(
                self._cost, topology=replace(self._cost.topology, contributors=(one,)), timings={}
            ).cell_s(0, stage.start, stage.stop)
            for one in (contributor, with_boundless_memory(contributor))
        ]
        return alone[1] < 0.5 * alone[0]

    def _with_boundless(self, machine: int) -> TrainingCost:
        contributors = list(self._cost.topology.contributors)
        contributors[machine] = _boundless(contributors[machine])
        timings = {
            name: timed for name, timed in self._cost.timings.items() if name != contributors[machine].id
        }
        topology = replace(self._cost.topology, contributors=tuple(contributors))
        return replace(self._cost, topology=topology, timings=timings)

    def _with_links(self, one: Sequence[int], other: Sequence[int], **changed: float) -> TrainingCost:
        network = self._cost.network
        tables = {name: getattr(network, name).copy() for name in changed}
        for name, value in changed.items():
            tables[name][np.ix_(one, other)] = value
            tables[name][np.ix_(other, one)] = value
        return replace(self._cost, network=replace(network, **tables))


def with_boundless_memory(machine: Contributor) -> Contributor:
    """Return the machine as if it never waited for its memory."""
    devices = tuple(replace(device, memory_bytes_per_s=0.0) for device in machine.devices)
    return replace(machine, devices=devices)


def _boundless(machine: Contributor) -> Contributor:
    devices = tuple(
        replace(
            device,
            flops_per_s={dtype: speed * _BOUNDLESS for dtype, speed in device.flops_per_s.items()},
            memory_bytes_per_s=device.memory_bytes_per_s * _BOUNDLESS,
            overhead_s=0.0,
        )
        for device in machine.devices
    )
    return replace(machine, devices=devices)
