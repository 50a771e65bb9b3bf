"""Errors for models that cannot be served: the missing bytes, and remedies. Each remedy was tried in the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from share_compute.errors import PlanInfeasible
from share_compute.planning.explain.remedies import (
    cut_off_text,
    lent_bytes,
    more_machines,
    more_memory,
    most,
    to_lend,
    whole_text,
)
from share_compute.planning.network.network import Network
from share_compute.planning.serving.cost import ServingCost
from share_compute.planning.serving.search import search_serving
from share_compute.quantities import bytes_text, exact_bytes_text
from share_compute.specification.workload import ServingWorkload

_MOST_MACHINES_TRIED = 64
"""Maximum number of machines with which `_fits` searches: the machines that lend the most memory."""


def serving_infeasible(cost: ServingCost, stages: int | None) -> PlanInfeasible:
    """Return the error that explains why no placement serves these requests.

    Args:
        cost: the deployment for which `search_serving` found nothing.
        stages: requested number of stages, one machine each; None if the search may choose it.
    """
    if stages is not None and (wrong := _wrong_count(cost, stages)):
        return wrong
    needed = to_lend(float(cost.needed_bytes[0, cost.num_layers]))
    lent = lent_bytes(cost.topology)
    remedies = list(_remedies(cost, stages))
    details = {
        "needed_bytes": needed,
        "lent_bytes": lent,
        "missing_bytes": max(needed - lent, 0),
        "would_fit": remedies,
    }
    request = cost.workload
    workload_text = (
        f"serving {request.concurrent} at a time, {request.prompt_tokens} + {request.new_tokens} tokens each,"
    )
    if needed > lent:
        message = (
            f"{workload_text} needs {exact_bytes_text(needed)} of lent memory and these machines lend "
            f"{exact_bytes_text(lent)}: {exact_bytes_text(needed - lent)} are missing{whole_text(cost.profile)}"
        )
    elif _fits(replace(cost, network=Network.alike(cost.num_machines)), stages):
        message = (
            f"no usable links join machines that could hold the model together; {workload_text} needs them"
        )
        message += cut_off_text(cost.topology)
    else:
        message = (
            f"{workload_text} needs {bytes_text(needed)}, and these machines lend {bytes_text(lent)}, but no cut "
            f"between layers gives each machine a part that it can hold{whole_text(cost.profile)}"
        )
    hint = remedies[0] if remedies else "let more machines join, lend more memory, or serve fewer at a time"
    return PlanInfeasible(message, hint=hint, details=details)


def _wrong_count(cost: ServingCost, stages: int) -> PlanInfeasible | None:
    """Return the error for more stages than layers or machines; None if the number of stages is possible."""
    layers, machines = cost.num_layers, cost.num_machines
    if stages > layers:
        return PlanInfeasible(
            f"{stages} stages cannot share {layers} layers: each needs at least one",
            hint=f"ask for at most {layers} stages",
            details={"stages": stages, "layers": layers},
        )
    missing = stages - machines
    if missing <= 0:
        return None
    lacking = "1 more machine" if missing == 1 else f"{missing} more machines"
    return PlanInfeasible(
        f"{stages} stages need {stages} machines, and {machines} {'is' if machines == 1 else 'are'} there",
        hint=f"let {lacking} join, or leave out stages",
        details={"machines_needed": stages, "machines_ready": machines},
    )


def _remedies(cost: ServingCost, stages: int | None) -> Iterator[str]:
    """Yield changes that make the model fit: fewer requirements, then more lent memory, then more machines."""

    def fits_with(concurrent: int) -> bool:
        return _fits(_asking(cost, replace(cost.workload, concurrent=concurrent)), stages)

    if stages is not None and cost.profile.no_cut_reason is None and _fits(cost, None):
        yield "leave out stages"
    concurrent = most(cost.workload.concurrent - 1, fits_with)
    if concurrent:
        yield f"serve at most {concurrent} at a time"
    yield from more_memory(
        cost.topology,
        float(cost.needed_bytes[0, cost.num_layers]),
        lambda topology: _fits(replace(cost, topology=topology), stages),
    )
    yield from more_machines(
        cost.topology,
        cost.network,
        lambda topology, network: _fits(replace(cost, topology=topology, network=network), stages),
    )


def _fits(cost: ServingCost, stages: int | None) -> bool:
    """Return whether a layout that fits was found; latency limits and the objective are ignored."""
    if cost.num_machines > _MOST_MACHINES_TRIED:
        lending = [machine.memory_bytes for machine in cost.topology.contributors]
        order = sorted(range(cost.num_machines), key=lambda machine: (-lending[machine], machine))
        cost = cost.part(order[:_MOST_MACHINES_TRIED])
    whole = float(cost.needed_bytes[0, cost.num_layers])
    smallest = min(float(cost.needed_bytes[layer, layer + 1]) for layer in range(cost.num_layers))
    if whole > float(cost.memory_bytes.sum()) or smallest > float(cost.memory_bytes.max()):
        return False
    request = replace(cost.workload, objective="latency", first_token_limit_s=None, next_token_limit_s=None)
    return bool(search_serving(_asking(cost, request), finalists=1, stages=stages))


def _asking(cost: ServingCost, workload: ServingWorkload) -> ServingCost:
    return replace(cost, workload=workload)
