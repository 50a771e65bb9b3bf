"""Makes the part of a plan that describes how the members of a stage sum their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.plan import SumPlan


def sum_plan(cost: TrainingCost, start: int, stop: int, machines: Sequence[int]) -> SumPlan | None:
    """Return the chosen algorithm for the gradients of layers [start, stop), with the predictions of all algorithms.

    Return None for fewer than two machines.

    Args:
        cost: cost model of the job.
        start: first layer of the stage.
        stop: one past its last layer.
        machines: members of the stage, as indices into the topology of ``cost``.
    """
    if len(machines) < 2:
        return None
    kind, size = cost.kinds[machines[0]], cost.trained_parameters(start, stop) * cost.summed_bytes
    best = cost.sums.best(machines, kind, size)
    seconds = {time.algorithm: time.of(size) for time in cost.sums.all(machines, kind)}
    return SumPlan(
        algorithm=best.algorithm,
        sites=cost.sums.sites(machines),
        seconds={name: value if math.isfinite(value) else None for name, value in seconds.items()},
        received_bytes=math.ceil(size * best.received),
        crossing_bytes=math.ceil(size * best.crossing),
    )
