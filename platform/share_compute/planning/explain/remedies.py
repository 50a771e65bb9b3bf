"""Remedies for infeasible jobs and deployments: more memory or more machines.

Each remedy is tried in the cost model before it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.cost.tables import MEMORY_SHARE
from share_compute.planning.network.network import Network
from share_compute.quantities import bytes_text, exact_bytes_text, listed
from share_compute.topology import Topology

_MOST_FACTOR = 64
_NEWCOMERS = (1, 2, 4, 8, 16)
_PARTS = 100
"""Denominator of the factors that are searched and reported: hundredths."""


def to_lend(needed_bytes: float) -> int:
    """Return the fewest bytes that a machine must lend for a plan to use ``needed_bytes`` of them."""
    lent = math.ceil(needed_bytes / MEMORY_SHARE)
    return lent if MEMORY_SHARE * lent >= needed_bytes else lent + 1  # the division may round down


def lent_bytes(topology: Topology) -> int:
    """Return the bytes that all machines lend in total."""
    return sum(machine.memory_bytes for machine in topology.contributors)


def cut_off_text(topology: Topology) -> str:
    """Return the end of a message: the pairs of machines with dead links; "" if there are none."""
    pairs = [" - ".join(sorted(topology[end].name for end in pair)) for pair in topology.cut_off]
    return f"; these do not reach each other: {listed(pairs)}" if pairs else ""


def whole_text(profile: ModelProfile) -> str:
    """Return the end of a message: why one machine must hold the whole model; "" if the model can be cut."""
    reason = profile.no_cut_reason
    return "" if reason is None else f"; one machine must hold the whole model, which cannot be cut: {reason}"


def largest(topology: Topology) -> int:
    """Return the index of the machine that lends the most memory; ties go to the fastest."""
    machines = topology.contributors
    return max(
        range(len(machines)),
        key=lambda index: (machines[index].memory_bytes, machines[index].flops_per_s(), -index),
    )


def more_memory(topology: Topology, whole_bytes: float, fits: Callable[[Topology], bool]) -> list[str]:
    """Return, as texts, ways of lending more memory that make the work fit, the fewest bytes first.

    Args:
        topology: the machines as they are; at least one.
        whole_bytes: memory in bytes that one machine fills if it holds all layers.
        fits: predicate that says whether the work fits on given machines.
    """
    ways = []
    index, before = largest(topology), lent_bytes(topology)
    alone = _with_memory(topology, index, to_lend(whole_bytes))
    more = lent_bytes(alone) - before
    if more > 0 and fits(alone):
        ways.append((more, f"lend {exact_bytes_text(more)} more on {topology.contributors[index].name}"))
    factor = _least_factor(lambda factor: fits(_times(topology, factor)))
    if factor is not None:
        more = lent_bytes(_times(topology, factor)) - before
        text = f"lend {factor:g} times the memory on every machine: {exact_bytes_text(more)} more in all"
        ways.append((more, text))
    return [text for _, text in sorted(ways)]


def more_machines(
    topology: Topology, network: Network, fits: Callable[[Topology, Network], bool]
) -> Iterator[str]:
    """Yield, as text, the first number of machines in `_NEWCOMERS` whose addition makes the work fit, if any.

    Each additional machine is a copy of the machine that lends the most memory, in the same region.

    Args:
        topology: the machines as they are; at least one.
        network: links between the machines.
        fits: predicate that says whether the work fits on given machines.
    """
    index = largest(topology)
    model = topology.contributors[index]
    for count in _NEWCOMERS:
        copies = tuple(
            replace(model, id=f"{model.id}+{number}", name=f"{model.name}+{number}")
            for number in range(count)
        )
        region = np.append(network.region, [network.region[index]] * count)
        grown = replace(topology, contributors=(*topology.contributors, *copies))
        if fits(grown, replace(network, region=region)):
            machines = "one more machine" if count == 1 else f"{count} more machines"
            yield f"let {machines} like {model.name} ({bytes_text(model.memory_bytes)}) join"
            return


def most(limit: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to ``limit`` for which ``holds`` is true, by bisection; 0 if there is none.

    If ``holds`` is true for a number, it must be true for all smaller numbers.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _least_factor(fits: Callable[[float], bool]) -> float | None:
    """Return the least factor above 1, in hundredths, for which ``fits`` is true; None if it exceeds `_MOST_FACTOR`."""
    if not fits(_MOST_FACTOR):
        return None
    too_small = most(_MOST_FACTOR * _PARTS - 1, lambda part: part <= _PARTS or not fits(part / _PARTS))
    return (too_small + 1) / _PARTS


def _times(topology: Topology, factor: float) -> Topology:
    return replace(
        topology,
        contributors=tuple(
            machine.with_memory(math.floor(machine.memory_bytes * factor))
            for machine in topology.contributors
        ),
    )


def _with_memory(topology: Topology, index: int, memory_bytes: int) -> Topology:
    machines = list(topology.contributors)
    machines[index] = machines[index].with_memory(memory_bytes)
    return replace(topology, contributors=tuple(machines))
