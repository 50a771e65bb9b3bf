"""When no plan exists: what is missing, in bytes, and what would make the job fit. Each remedy named was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from share_compute.errors import PlanInfeasible
from share_compute.planning.cost import MEMORY_SHARE
from share_compute.planning.layout import Layout
from share_compute.planning.network import Network
from share_compute.planning.partitioning import PartitioningStrategy
from share_compute.planning.problem import Problem
from share_compute.planning.strategies import AutoPartitioning, RecursivePartitioning
from share_compute.planning.words import bytes_text, exact_bytes_text, listed
from share_compute.topology import Contributor

_MOST_MACHINES_TRIED = 64
"""Remedies are tried with up to so many machines."""
_SMALL = 8
"""With more machines, a quick strategy tries them; `auto` takes its placements into account, too."""
_NEWCOMERS = (1, 2, 4, 8, 16)
_MOST_FACTOR = 64.0
_FACTOR_STEPS = 12


def infeasible(strategy: PartitioningStrategy, problem: Problem, tried: Layout | None) -> PlanInfeasible:
    """Return the error that explains why ``strategy`` has no plan.

    Args:
        strategy: what was asked.
        problem: what it was asked.
        tried: its layout that does not fit or that links cannot serve; None when it knew none.
    """
    cost = problem.cost
    if cost.num_machines > _SMALL and isinstance(strategy, AutoPartitioning):
        strategy = RecursivePartitioning()
    lent = {
        machine.name: float(bytes_)
        for machine, bytes_ in zip(cost.topology.contributors, cost.memory_bytes, strict=True)
    }
    if tried is not None and cost.fits(tried):
        return _unreachable(problem, tried)
    missing = _missing(problem, tried) if tried is not None else {}
    if tried is not None:
        needed = _needed(problem, tried)
        lent = {
            cost.topology.contributors[machine].name: float(cost.memory_bytes[machine])
            for machine in tried.machines
        }
    else:
        needed = cost.bytes_needed(0, cost.num_layers, 1, 0)
    total = sum(lent.values())
    remedies = list(_remedies(strategy, problem))
    details = {
        "needed_bytes": round(needed),
        "lent_bytes": round(total),
        "missing_bytes": max(round(needed) - round(total), 0),
        "missing_by_machine": {name: round(size) for name, size in missing.items()},
        "would_fit": remedies,
    }
    mend = remedies[0] if remedies else "let more machines join, lend more memory, or use a smaller model"
    if needed > total:
        message = (
            f"the job needs {exact_bytes_text(needed)} and these machines lend {exact_bytes_text(total)} for it: "
            f"{exact_bytes_text(needed - total)} are missing"
        )
        return PlanInfeasible(message, mend=mend, details=details)
    if missing:
        worst = max(missing, key=missing.__getitem__)
        message = (
            f"{worst} lacks {exact_bytes_text(missing[worst])} for the layers that this strategy gives it"
        )
        return PlanInfeasible(message, machine=worst, mend=mend, details=details)
    if _feasible(strategy, _with_links(problem)):
        message = "no usable links join machines that could hold the job together"
        return PlanInfeasible(
            message, mend=remedies[0] if remedies else "look at share-compute topology", details=details
        )
    message = (
        f"the machines lend {bytes_text(total)}, the job needs {bytes_text(needed)}, but no cut between layers gives "
        f"each machine a part that it can hold; the largest layer needs {exact_bytes_text(_largest_layer(problem))}"
    )
    return PlanInfeasible(message, mend=mend, details=details)


def _unreachable(problem: Problem, tried: Layout) -> PlanInfeasible:
    cost = problem.cost
    dead = [
        (cost.topology.contributors[one].name, cost.topology.contributors[other].name)
        for before, after in zip(tried.pools, tried.pools[1:], strict=False)
        for one in before.members
        for other in after.members
        if math.isinf(cost.network.transfer_s(one, other, 1.0))
    ]
    dead += [
        (cost.topology.contributors[one].name, cost.topology.contributors[other].name)
        for pool in tried.pools
        for place, one in enumerate(pool.members)
        for other in pool.members[place + 1 :]
        if math.isinf(cost.network.transfer_s(one, other, 1.0))
    ]
    pairs = listed([f"{one} to {other}" for one, other in dead])
    return PlanInfeasible(
        f"this strategy puts neighbours on machines without a usable link: {pairs}",
        mend="use parallelism.strategy: auto, which goes around dead links, or mend the link",
        details={"dead_links": [list(pair) for pair in dead]},
    )


def _needed(problem: Problem, tried: Layout) -> float:
    return sum(
        problem.cost.member_bytes(tried, place, seat)
        for place, pool in enumerate(tried.pools)
        for seat in range(len(pool.members))
    )


def _missing(problem: Problem, tried: Layout) -> dict[str, float]:
    """Return by machine how much more memory it would have to lend for its part."""
    cost = problem.cost
    short = {
        machine: cost.member_bytes(tried, place, seat) - float(cost.memory_bytes[machine])
        for place, pool in enumerate(tried.pools)
        for seat, machine in enumerate(pool.members)
    }
    return {
        cost.topology.contributors[machine].name: size / MEMORY_SHARE
        for machine, size in short.items()
        if size > 0
    }


def _largest_layer(problem: Problem) -> float:
    cost = problem.cost
    return max(cost.bytes_needed(layer, layer + 1, 1, 0) for layer in range(cost.num_layers))


def _remedies(strategy: PartitioningStrategy, problem: Problem) -> Iterator[str]:
    """Give what the submitter or the operator could change so that the job fits, the smallest change first."""
    if problem.cost.num_machines > _MOST_MACHINES_TRIED:
        return
    workload = problem.cost.workload
    if (problem.pools, problem.members_per_pool) != (None, None) and _feasible(
        strategy, replace(problem, pools=None, members_per_pool=None)
    ):
        yield "leave parallelism.pools and parallelism.members_per_pool to the planner"
    finest = workload.batch_size
    if workload.microbatches < finest and _feasible(
        strategy, _changed(problem, workload=replace(workload, microbatches=finest))
    ):
        yield f"cut the batch finer: set training.microbatches to {finest}"
    if workload.optimizer_tensors and _feasible(
        strategy, _changed(problem, workload=replace(workload, optimizer_tensors=0))
    ):
        yield "use training.optimizer.name: sgd, which keeps no state beside the weights"
    if not problem.cost.num_machines:
        return
    yield from _more_memory(strategy, problem)
    yield from _more_machines(strategy, problem)


def _more_memory(strategy: PartitioningStrategy, problem: Problem) -> Iterator[str]:
    if not _feasible(strategy, _with_memory(problem, _MOST_FACTOR)):
        return
    low, high = 1.0, _MOST_FACTOR
    for _ in range(_FACTOR_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _feasible(strategy, _with_memory(problem, middle)) else (middle, high)
    lent = sum(machine.memory_bytes for machine in problem.cost.topology.contributors)
    yield f"lend {high:.1f} times the memory on every machine: {exact_bytes_text((high - 1) * lent)} more in all"


def _more_machines(strategy: PartitioningStrategy, problem: Problem) -> Iterator[str]:
    contributors = problem.cost.topology.contributors
    largest = max(range(len(contributors)), key=lambda index: (contributors[index].memory_bytes, -index))
    for count in _NEWCOMERS:
        if _feasible(strategy, _with_copies(problem, largest, count)):
            machines = "one more machine" if count == 1 else f"{count} more machines"
            like = f"{contributors[largest].name} ({bytes_text(contributors[largest].memory_bytes)})"
            yield f"let {machines} like {like} join"
            return


def _feasible(strategy: PartitioningStrategy, problem: Problem) -> bool:
    try:
        candidates = strategy.place(problem)
    except PlanInfeasible:
        return False
    return any(
        problem.cost.fits(candidate.layout) and math.isfinite(problem.cost.step_s(candidate.layout))
        for candidate in candidates
    )


def _changed(problem: Problem, **changes: object) -> Problem:
    return replace(problem, cost=replace(problem.cost, **changes))  # type: ignore[arg-type]


def _with_links(problem: Problem) -> Problem:
    """Return the problem with all machines on one fast network."""
    return _changed(problem, network=Network.alike(problem.cost.num_machines))


def _with_memory(problem: Problem, factor: float) -> Problem:
    topology = problem.cost.topology
    machines = tuple(_lending(machine, factor) for machine in topology.contributors)
    return _changed(problem, topology=replace(topology, contributors=machines))


def _lending(machine: Contributor, factor: float) -> Contributor:
    devices = tuple(
        replace(device, memory_bytes=math.ceil(device.memory_bytes * factor)) for device in machine.devices
    )
    return replace(machine, devices=devices)


def _with_copies(problem: Problem, index: int, count: int) -> Problem:
    """Return the problem with more machines like one of its own, beside it."""
    topology, network = problem.cost.topology, problem.cost.network
    model = topology.contributors[index]
    copies = tuple(
        replace(model, id=f"{model.id}+{number}", name=f"{model.name}+{number}") for number in range(count)
    )
    return _changed(
        problem,
        topology=replace(topology, contributors=(*topology.contributors, *copies)),
        network=replace(network, region=np.append(network.region, [network.region[index]] * count)),
    )
