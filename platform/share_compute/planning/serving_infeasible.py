"""When no machines can hold a model for requests: what is missing, in bytes, and what would fit, each tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from share_compute.errors import PlanInfeasible
from share_compute.planning.network import Network
from share_compute.planning.serving import search_serving
from share_compute.planning.serving_cost import ServingCost
from share_compute.planning.words import bytes_text, exact_bytes_text
from share_compute.planning.workload import ServingWorkload
from share_compute.topology import Contributor

_MOST_MACHINES_TRIED = 64
"""Remedies are tried with up to so many machines."""
_MOST_FACTOR = 64


def serving_infeasible(cost: ServingCost) -> PlanInfeasible:
    """Return the error that explains why nothing serves these requests.

    Args:
        cost: the deployment for which `search_serving` found nothing.
    """
    needed = math.ceil(float(cost.needed_bytes[0, cost.num_layers]))
    lent = round(float(cost.memory_bytes.sum()))
    remedies = list(_remedies(cost)) if cost.num_machines <= _MOST_MACHINES_TRIED else []
    details = {
        "needed_bytes": needed,
        "lent_bytes": lent,
        "missing_bytes": max(needed - lent, 0),
        "would_fit": remedies,
    }
    request = cost.workload
    asked = (
        f"serving {request.concurrent} at a time, {request.prompt_tokens} + {request.new_tokens} tokens each,"
    )
    if needed > lent:
        message = (
            f"{asked} needs {exact_bytes_text(needed)} and these machines lend {exact_bytes_text(lent)} for it: "
            f"{exact_bytes_text(needed - lent)} are missing"
        )
    elif _fits(replace(cost, network=Network.alike(cost.num_machines))):
        message = f"no usable links join machines that could hold the model together; {asked} needs them"
    else:
        message = (
            f"{asked} needs {bytes_text(needed)}, and these machines lend {bytes_text(lent)} for it, but no cut "
            "between layers gives each machine a part that it can hold"
        )
    mend = remedies[0] if remedies else "let more machines join, lend more memory, or serve fewer at a time"
    return PlanInfeasible(message, mend=mend, details=details)


def _remedies(cost: ServingCost) -> Iterator[str]:
    """Give what could be asked or lent instead, the smallest change first."""

    def fits_with(concurrent: int) -> bool:
        return _fits(_asking(cost, replace(cost.workload, concurrent=concurrent)))

    most = _largest(cost.workload.concurrent - 1, fits_with)
    if most:
        yield f"serve at most {most} at a time"

    def fits_lending(factor: int) -> bool:
        machines = tuple(_lending(machine, factor) for machine in cost.topology.contributors)
        return _fits(replace(cost, topology=replace(cost.topology, contributors=machines)))

    # Falls as the factor grows, so that the largest that does not fit is looked for.
    if fits_lending(_MOST_FACTOR):
        factor = _largest(_MOST_FACTOR, lambda number: not fits_lending(number)) + 1
        yield f"lend {factor} times the memory on every machine"


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to ``most`` that holds, where smaller ones do, too; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _fits(cost: ServingCost) -> bool:
    """Return whether some layout fits and all its links work. Limits and objective do not matter for that."""
    whole = float(cost.needed_bytes[0, cost.num_layers])
    smallest = min(float(cost.needed_bytes[layer, layer + 1]) for layer in range(cost.num_layers))
    if whole > float(cost.memory_bytes.sum()) or smallest > float(cost.memory_bytes.max()):
        return False
    request = replace(cost.workload, objective="latency", first_token_limit_s=None, next_token_limit_s=None)
    return bool(search_serving(_asking(cost, request), finalists=1))


def _asking(cost: ServingCost, workload: ServingWorkload) -> ServingCost:
    return replace(cost, workload=workload)


def _lending(machine: Contributor, factor: int) -> Contributor:
    devices = tuple(replace(device, memory_bytes=device.memory_bytes * factor) for device in machine.devices)
    return replace(machine, devices=devices)
