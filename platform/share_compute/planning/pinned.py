"""Pinned plans: places a job exactly as its plan file says, or raises an error that lists the differences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, combinations, pairwise, product
from typing import Any

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.explain.remedies import to_lend
from share_compute.planning.plan import layer_span
from share_compute.planning.search.problem import SearchProblem
from share_compute.planning.search.strategies import is_measured
from share_compute.quantities import bytes_text, listed
from share_compute.specification.placement.pinned_plan import PinnedModel, PinnedPlan
from share_compute.topology import Topology

_MOST_NAMED = 8
_HINT = "write another plan file with share-compute plan --output, or leave out parallelism.plan"


def pinned_layout(pinned: PinnedPlan, problem: SearchProblem, topology: Topology) -> Layout:
    """Return the layout of a pinned plan.

    Args:
        pinned: the plan.
        problem: the job on its machines, with the plan's number of microbatches.
        topology: all machines of the job, also those whose speed is unknown.

    Raises:
        PlanInfeasible: a machine is missing, not measured or too small, a link between neighbours is dead, or the
            model differs; the message names all that differs.
    """
    cost = problem.cost
    _require_same_model(pinned.model, cost.profile)
    index = {machine.name: place for place, machine in enumerate(cost.topology.contributors)}
    absent = [name for name in pinned.names if name not in index]
    if absent:
        raise _absent(absent, topology)
    layout = Layout(
        tuple(
            StageLayout(
                stage.first_layer,
                stage.last_layer + 1,
                tuple(index[member.name] for member in stage.machines),
                tuple(member.microbatches for member in stage.machines),
            )
            for stage in pinned.stages
        )
    )
    for stage in layout.stages:
        if len({cost.kinds[machine] for machine in stage.members}) > 1:
            span = layer_span(stage.start, stage.stop)
            raise _refused(f"{span} would mix different kinds of devices in one stage")
    small = list(_too_small(cost, layout))
    if small:
        missing = {name: needed - lent for name, lent, needed in small}
        texts = [
            f"{name} lends {bytes_text(lent)} and needs {bytes_text(needed)}" for name, lent, needed in small
        ]
        raise _refused(listed(texts, _MOST_NAMED), machine=small[0][0], missing_by_machine=missing)
    dead = _dead_links(cost, layout)
    if dead:
        raise _refused(f"no usable link joins {listed(dead, _MOST_NAMED)}")
    return layout


def require_same_microbatches(pinned: PinnedPlan, microbatches: int | None) -> None:
    """Check that a checkpoint has the plan's number of microbatches; None allows any number.

    Raises:
        PlanInfeasible: the pinned plan has another number.
    """
    if microbatches not in (None, pinned.microbatches):
        raise _refused(
            f"it has {pinned.microbatches} microbatches, and the job has {microbatches}", is_lasting=True
        )


def require_finite(step_s: float) -> None:
    """Check the predicted time of a step, in seconds.

    Raises:
        PlanInfeasible: the time is infinite, because machines that share tied weights have no usable link.
    """
    if math.isinf(step_s):
        raise _refused("no usable link joins the machines that share tied weights")


def _require_same_model(model: PinnedModel, profile: ModelProfile) -> None:
    layers = len(profile.layers)
    if model.layers != layers:
        raise _refused(
            f"it is for a model of {model.layers} layers, and this model has {layers}", is_lasting=True
        )
    if model.digest != profile.digest:
        raise _refused(
            f"it is for another model: types or sizes of the {layers} layers differ "
            f"(digest {model.digest[:8]}, this model has {profile.digest[:8]})",
            is_lasting=True,
        )


def _absent(names: list[str], topology: Topology) -> PlanInfeasible:
    unmeasured = {machine.name for machine in topology.contributors if not is_measured(machine)}
    missing = [name for name in names if name not in unmeasured]
    if not missing:
        return _refused(f"the speed of {listed(names, _MOST_NAMED)} was not measured", machine=names[0])
    there = sorted(machine.name for machine in topology.contributors)
    ready = f"; ready are {listed(there, _MOST_NAMED)}" if there else ""
    return _refused(
        f"{listed(missing, _MOST_NAMED)} {'is' if len(missing) == 1 else 'are'} not among the job's machines{ready}",
        machine=missing[0],
        missing_machines=missing[:_MOST_NAMED],
    )


def _too_small(cost: TrainingCost, layout: Layout) -> Iterator[tuple[str, int, int]]:
    """Yield (name, lent bytes, required bytes) of each machine that cannot hold its part."""
    if cost.fits(layout):
        return
    for place, stage in enumerate(layout.stages):
        for member, machine in enumerate(stage.members):
            contributor = cost.topology.contributors[machine]
            needed = to_lend(cost.member_bytes(layout, place, member))
            if needed > contributor.memory_bytes:
                yield contributor.name, contributor.memory_bytes, needed


def _dead_links(cost: TrainingCost, layout: Layout) -> list[str]:
    between = chain.from_iterable(
        product(one.members, other.members) for one, other in pairwise(layout.stages)
    )
    within = chain.from_iterable(combinations(stage.members, 2) for stage in layout.stages)
    machines = cost.topology.contributors
    return [
        f"{machines[one].name} to {machines[other].name}"
        for one, other in chain(between, within)
        if math.isinf(cost.network.transfer_s(one, other, 1.0))
    ]


def _refused(problem: str, machine: str | None = None, **details: Any) -> PlanInfeasible:
    return PlanInfeasible(
        f"parallelism.plan cannot be carried out: {problem}", hint=_HINT, machine=machine, details=details
    )
