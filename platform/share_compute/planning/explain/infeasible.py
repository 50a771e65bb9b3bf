"""Errors for jobs without a plan: the missing bytes, and remedies. Each remedy was tried in the cost model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, pairwise, product

from share_compute.errors import PlanInfeasible
from share_compute.planning.cost.layout import Layout, solo
from share_compute.planning.explain.remedies import (
    cut_off_text,
    more_machines,
    more_memory,
    to_lend,
    whole_text,
)
from share_compute.planning.network.network import Network
from share_compute.planning.search.partitioning import PartitioningStrategy
from share_compute.planning.search.problem import SearchProblem
from share_compute.planning.search.strategies import AutoPartitioning, RecursivePartitioning
from share_compute.quantities import bytes_text, exact_bytes_text, listed

_SMALL = 8
"""Maximum number of machines for which `_feasible` runs the strategy ``auto``.

With more machines, it runs `RecursivePartitioning` instead, which is faster.
"""


def infeasible(
    strategy: PartitioningStrategy, problem: SearchProblem, tried: Layout | None
) -> PlanInfeasible:
    """Return the error that explains why ``strategy`` has no plan.

    Args:
        strategy: the strategy that found no plan.
        problem: the job on its machines.
        tried: a layout of the strategy that does not fit or needs a dead link; None if the strategy proposed no layout.
    """
    cost = problem.cost
    if tried is not None and cost.fits(tried):
        return _unreachable(strategy, problem, tried)
    machines = range(cost.num_machines) if tried is None else tried.machines
    lent = sum(cost.topology.contributors[machine].memory_bytes for machine in machines)
    needed = (
        to_lend(cost.bytes_needed(0, cost.num_layers, 1, 0)) if tried is None else _needed(problem, tried)
    )
    missing = {} if tried is None else _missing(problem, tried)
    remedies = list(_remedies(strategy, problem))
    details = {
        "needed_bytes": needed,
        "lent_bytes": lent,
        "missing_bytes": max(needed - lent, 0),
        "missing_by_machine": missing,
        "would_fit": remedies,
    }
    hint = remedies[0] if remedies else "let more machines join, lend more memory, or use a smaller model"
    if needed > lent:
        message = (
            f"the job needs {exact_bytes_text(needed)} of lent memory and these machines lend "
            f"{exact_bytes_text(lent)}: {exact_bytes_text(needed - lent)} are missing{whole_text(cost.profile)}"
        )
        return PlanInfeasible(message, hint=hint, details=details)
    if missing:
        worst = max(missing, key=missing.__getitem__)
        message = (
            f"{worst} lacks {exact_bytes_text(missing[worst])} for the layers that this strategy gives it"
            f"{whole_text(cost.profile)}"
        )
        return PlanInfeasible(message, machine=worst, hint=hint, details=details)
    if _feasible(strategy, _with_links(problem)):
        message = "no usable links join machines that could hold the job together"
        message += cut_off_text(problem.cost.topology)
        return PlanInfeasible(
            message, hint=remedies[0] if remedies else "look at share-compute topology", details=details
        )
    message = (
        f"the machines lend {bytes_text(lent)}, the job needs {bytes_text(needed)}, but no cut between layers gives "
        f"each machine a part that it can hold; the largest layer needs {exact_bytes_text(_largest_layer(problem))}"
        f"{whole_text(cost.profile)}"
    )
    return PlanInfeasible(message, hint=hint, details=details)


def _unreachable(strategy: PartitioningStrategy, problem: SearchProblem, tried: Layout) -> PlanInfeasible:
    """Return the error for a layout that fits into memory but needs dead links."""
    machines, network = problem.cost.topology.contributors, problem.cost.network
    between = chain.from_iterable(
        product(one.members, other.members) for one, other in pairwise(tried.stages)
    )
    within = chain.from_iterable(combinations(stage.members, 2) for stage in tried.stages)
    dead = [
        (machines[one].name, machines[other].name)
        for one, other in chain(between, within)
        if math.isinf(network.transfer_s(one, other, 1.0))
    ]
    around = not isinstance(strategy, AutoPartitioning) and _feasible(AutoPartitioning(), problem)
    pairs = listed([f"{one} to {other}" for one, other in dead])
    return PlanInfeasible(
        f"this strategy puts neighbours on machines without a usable link: {pairs}",
        hint=("use parallelism.strategy: auto, which goes around dead links, or " if around else "")
        + "fix the link",
        details={"dead_links": [list(pair) for pair in dead]},
    )


def _needed(problem: SearchProblem, tried: Layout) -> int:
    """Return the bytes that the machines of a layout would have to lend in total."""
    return sum(
        to_lend(problem.cost.member_bytes(tried, place, index))
        for place, stage in enumerate(tried.stages)
        for index in range(len(stage.members))
    )


def _missing(problem: SearchProblem, tried: Layout) -> dict[str, int]:
    """Return, by name, the additional bytes that each machine with too little memory would have to lend."""
    cost, machines = problem.cost, problem.cost.topology.contributors
    short = {
        machines[machine].name: to_lend(cost.member_bytes(tried, place, index))
        - machines[machine].memory_bytes
        for place, stage in enumerate(tried.stages)
        for index, machine in enumerate(stage.members)
    }
    return {name: size for name, size in short.items() if size > 0}


def _largest_layer(problem: SearchProblem) -> int:
    cost = problem.cost
    return to_lend(max(cost.bytes_needed(layer, layer + 1, 1, 0) for layer in range(cost.num_layers)))


def _can_share_optimizer(problem: SearchProblem) -> bool:
    """Return whether members of a stage could keep shares of the optimizer's state, but do not."""
    work, machines = problem.cost.workload, problem.cost.topology.contributors
    fits = not work.branch_tensors and work.run_bytes is None and work.collective in ("auto", "sharded")
    is_new = bool(work.optimizer_tensors) and not work.shares_optimizer and work.slices == 1
    return fits and is_new and all(machine.device.kind == "cpu" for machine in machines)


def _remedies(strategy: PartitioningStrategy, problem: SearchProblem) -> Iterator[str]:
    """Yield changes that make the job fit: first changes to the job, then more lent memory, then more machines."""
    workload = problem.cost.workload
    is_free = (problem.stages, problem.members_per_stage) == (None, None)
    if (
        not is_free
        and workload.slices == 1
        and problem.cost.profile.no_cut_reason is None
        and _feasible(strategy, replace(problem, stages=None, members_per_stage=None))
    ):
        yield "leave parallelism.stages and parallelism.members_per_stage to the planner"
    finest = workload.batch_size * workload.slices
    if workload.microbatches < finest and _feasible(
        strategy, _changed(problem, workload=replace(workload, microbatches=finest))
    ):
        yield f"cut the batch finer: set training.microbatches to {workload.batch_size}"
    if not workload.activation_checkpointing and _feasible(
        strategy, _changed(problem, workload=replace(workload, activation_checkpointing=True))
    ):
        yield "set training.activation_checkpointing: true, which keeps less of each layer and computes it again"
    if _can_share_optimizer(problem) and _feasible(
        strategy, _changed(problem, workload=replace(workload, shares_optimizer=True, collective="sharded"))
    ):
        yield "set parallelism.optimizer: sharded, so that machines of a stage share the optimizer's state"
    if workload.optimizer_tensors and _feasible(
        strategy, _changed(problem, workload=replace(workload, optimizer_tensors=0))
    ):
        yield "use training.optimizer.name: sgd, which keeps no state beside the weights"
    yield from more_memory(
        problem.cost.topology,
        problem.cost.member_bytes(solo(0, problem.cost.num_layers, workload.microbatches), 0, 0),
        lambda topology: _feasible(strategy, _changed(problem, topology=topology)),
    )
    yield from more_machines(
        problem.cost.topology,
        problem.cost.network,
        lambda topology, network: _feasible(strategy, _changed(problem, topology=topology, network=network)),
    )


def _feasible(strategy: PartitioningStrategy, problem: SearchProblem) -> bool:
    if isinstance(strategy, AutoPartitioning) and problem.cost.num_machines > _SMALL:
        strategy = RecursivePartitioning()
    try:
        candidates = strategy.place(problem)
    except PlanInfeasible:
        return False
    return any(problem.cost.is_feasible(candidate.layout) for candidate in candidates)


def _changed(problem: SearchProblem, **changes: object) -> SearchProblem:
    return replace(problem, cost=replace(problem.cost, **changes))  # type: ignore[arg-type]


def _with_links(problem: SearchProblem) -> SearchProblem:
    """Return the problem with all machines on one fast network."""
    return _changed(problem, network=Network.alike(problem.cost.num_machines))
