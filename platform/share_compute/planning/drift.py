"""Detects step times that drift from the prediction, and decides whether another plan is worth the cost of moving."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

from share_compute.errors import PlanInfeasible
from share_compute.files.strict import StrictModel
from share_compute.models.profiles.profile import FLOAT_BYTES, ModelProfile
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.cost.timings import Timings
from share_compute.planning.network.network import transfer_s
from share_compute.planning.plan import Plan
from share_compute.planning.planner import Solution, solve
from share_compute.quantities import bytes_text, listed, percent_text, seconds_text
from share_compute.specification import TrainJob
from share_compute.topology import Topology


class DriftLimits(StrictModel):
    """Thresholds for planning again, and the cost of changing a plan."""

    drift: float = 0.25
    """Maximum deviation of the measured step time from the predicted one, as a share of the predicted one."""
    steps: int = 20
    """Number of consecutive steps beyond ``drift`` after which drift first causes the job to be planned again."""
    least_gain: float = 0.05
    """Minimum share of the step time that another plan must save."""
    least_time_s: float = 60.0
    """Minimum seconds after a membership change before drift alone causes a new plan."""
    restart_s: float = 3.0
    """Assumed seconds without training while members reconnect, besides the time to move state."""


class DriftWatch:
    """Counts consecutive steps that drift beyond the limit.

    Args:
        limits: the permitted drift, and the number of steps that must exceed it.
    """

    def __init__(self, limits: DriftLimits) -> None:
        self._limits = limits
        self._needed = limits.steps
        self._beyond = 0

    def observe(self, predicted_s: float, measured_s: float) -> bool:
        """Record one step; return whether enough consecutive steps have drifted to plan the job again.

        After it has returned True, counting restarts with twice the required number of steps, because planning may have
        found no better plan.
        """
        drifted = abs(measured_s / predicted_s - 1) > self._limits.drift
        self._beyond = self._beyond + 1 if drifted else 0
        if self._beyond < self._needed:
            return False
        self._beyond = 0
        self._needed *= 2
        return True


@dataclass(frozen=True, slots=True)
class Replan:
    """A plan that is worth moving to."""

    solution: Solution
    current_step_s: float
    """Step time of the plan in use, predicted from the measured times."""
    gain_s: float
    """Seconds saved over all remaining steps; the cost of moving is not subtracted."""
    move_cost_s: float
    moved_bytes: int
    """Bytes of weights and optimizer state that machines must fetch."""
    sentence: str


def plan_again(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    epoch: int,
    timings: Timings,
    *,
    in_use: int,
) -> Solution:
    """Plan a running job with its requested layout, or with the best layout if the machines cannot satisfy the request.

    With ``parallelism.backups``, a job that runs on several machines, or requests several, gets at least two machines
    if possible. A single machine could not back up its state. A pinned plan is ignored: it is the first plan of a job.

    Args:
        spec: the job.
        topology: the machines.
        profile: cost profile of the model.
        epoch: epoch of the plan.
        timings: measured times of the layers.
        in_use: number of machines that hold layers of the job now.

    Raises:
        PlanInfeasible: the machines cannot hold the model.
    """
    needs_two = spec.parallelism.backups and max(in_use, spec.parallelism.machines_needed) > 1
    spec = spec.without_pinned_plan()
    try:
        found = solve(spec, topology, profile, epoch, timings)
    except PlanInfeasible:
        if spec.parallelism.stages is None and spec.parallelism.members_per_stage is None:
            raise
        spec = _laid_out(spec, None, None)
        found = solve(spec, topology, profile, epoch, timings)
    if not needs_two or len(found.layout.machines) > 1 or len(topology.contributors) == 1:
        return found
    spread = []
    for stages, members in ((2, None), (1, 2)):
        with suppress(PlanInfeasible):
            spread.append(solve(_laid_out(spec, stages, members), topology, profile, epoch, timings))
    return min(spread, key=_predicted_s, default=found)


def _laid_out(spec: TrainJob, stages: int | None, members: int | None) -> TrainJob:
    layout = {"strategy": "auto", "stages": stages, "members_per_stage": members}
    return spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update=layout)})


def _predicted_s(solution: Solution) -> float:
    return math.inf if solution.timeline is None else solution.timeline.step_s


def propose(
    spec: TrainJob,
    topology: Topology,
    current: Solution,
    timings: Timings,
    steps_left: int,
    limits: DriftLimits,
    under_way: Solution | None = None,
) -> Replan | None:
    """Plan again with measured times; return the new plan if it is worth the cost of moving, otherwise None.

    A job with fewer machines than requested moves to more machines at any cost.

    Args:
        spec: the job.
        topology: the machines that the job may use.
        current: the plan in use.
        timings: measured times of the layers on its machines.
        steps_left: number of steps that would run on the new plan.
        limits: the thresholds; only ``restart_s`` and ``least_gain`` are used.
        under_way: the plan that the job is about to move to; None if there is none. If a new plan's shards differ from
            those of this plan, it must also be worth the cost compared with this plan.
    """
    # Keep the number of microbatches: another number would change the order of gradient sums, and so the result.
    fixed = spec.with_microbatches(current.plan.microbatches)
    count, requested = len(current.layout.machines), spec.parallelism.machines_needed
    try:
        better = plan_again(
            fixed,
            topology,
            current.cost.profile,
            current.plan.epoch + 1,
            timings,
            in_use=count,
        )
    except PlanInfeasible:
        return None
    present = _numbered_as_in(current, better)
    if present is None or better.plan.prediction is None or layout_of(better.plan) == layout_of(current.plan):
        return None
    better_s, now_s = better.plan.prediction.step_s, simulate_step(better.cost, present).step_s
    carried_s, moved_bytes = moving(better.cost, present, better.layout)
    move_cost_s = carried_s + limits.restart_s
    if not math.isfinite(now_s + move_cost_s):
        return None

    def pays(step_s: float) -> bool:
        return (step_s - better_s) * steps_left > max(move_cost_s, limits.least_gain * step_s * steps_left)

    is_restored = count < min(requested, len(better.layout.machines))
    if not (is_restored or pays(now_s)):
        return None
    if under_way is not None and not have_same_shards(under_way.plan, better.plan):
        expected = _numbered_as_in(under_way, better)
        expected_s = math.inf if expected is None else simulate_step(better.cost, expected).step_s
        if math.isfinite(expected_s) and not (is_restored or pays(expected_s)):
            return None
    gain_s = (now_s - better_s) * steps_left
    step_text = f"a step would take {seconds_text(better_s)} instead of {seconds_text(now_s)}"
    if is_restored:
        sentence = f"the job asks for {requested} machines and was left on {count}; {step_text}"
    else:
        sentence = (
            f"with layers moved, {step_text} ({percent_text(1 - better_s / now_s)} less); over {steps_left} steps "
            f"that saves {seconds_text(gain_s)}, moving {bytes_text(moved_bytes)} costs {seconds_text(move_cost_s)}"
        )
    used = {topology[machine].name for _, _, members in layout_of(current.plan) for machine, _ in members}
    taken_in = sorted(
        {topology[machine].name for _, _, members in layout_of(better.plan) for machine, _ in members} - used
    )
    if taken_in:
        sentence += f"; it takes in {listed(taken_in)}, if no other job has taken them"
    return Replan(better, now_s, gain_s, move_cost_s, moved_bytes, sentence)


def _numbered_as_in(solution: Solution, better: Solution) -> Layout | None:
    """Convert the layout of ``solution`` to the machine indices of ``better``'s topology.

    Return None if that topology lacks a machine of the layout.
    """
    place = {machine.id: index for index, machine in enumerate(better.cost.topology.contributors)}
    ids = [machine.id for machine in solution.cost.topology.contributors]
    if any(ids[machine] not in place for machine in solution.layout.machines):
        return None
    return solution.layout.renumbered({machine: place[ids[machine]] for machine in solution.layout.machines})


def moving(cost: TrainingCost, before: Layout, after: Layout) -> tuple[float, int]:
    """Return (seconds, bytes) to move weights and optimizer state from one layout to another.

    Each machine fetches its missing layers one after the other, each from the holder with the fastest link. Machines
    fetch in parallel. The time is infinite if a machine has only dead links to the holders of a missing layer.
    """
    holders: dict[int, list[int]] = defaultdict(list)
    for stage in before.stages:
        for layer in range(stage.start, stage.stop):
            holders[layer].extend(stage.members)
    moved_bytes = 0
    slowest_s = 0.0
    for stage in after.stages:
        for machine in stage.members:
            fetched_s = 0.0
            for layer in range(stage.start, stage.stop):
                if machine in holders[layer]:
                    continue
                size = _state_bytes(cost, layer)
                moved_bytes += size
                fetched_s += min(
                    transfer_s(*cost.network.link(holder, machine), size) for holder in holders[layer]
                )
            slowest_s = max(slowest_s, fetched_s)
    return slowest_s, moved_bytes


def _state_bytes(cost: TrainingCost, layer: int) -> int:
    held, trained = (float(table[layer + 1] - table[layer]) for table in (cost.parameters, cost.trained))
    return math.ceil(FLOAT_BYTES * (held + trained * cost.workload.state_tensors))


def layout_of(plan: Plan) -> list[tuple[int, int, tuple[tuple[str, tuple[int, ...]], ...]]]:
    """Return (first layer, one past the last, ((contributor id, microbatch ids) of each member)) for each stage."""
    return [
        (
            stage.start,
            stage.stop,
            tuple((member.contributor_id, member.microbatches) for member in stage.members),
        )
        for stage in plan.stages
    ]


def have_same_shards(one: Plan, other: Plan) -> bool:
    """Return whether both plans have the same stages, with the same members in the same order."""

    def held(plan: Plan) -> list[tuple[int, int, list[str]]]:
        return [
            (start, stop, [machine for machine, _ in members]) for start, stop, members in layout_of(plan)
        ]

    return held(one) == held(other)
