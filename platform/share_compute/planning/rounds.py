"""Plans a job whose branches merge in rounds: one plan for each island, and the predicted figures of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.branches import (
    BranchPlace,
    contribution_bytes,
    exchange_s,
    idle_machines,
    island_topology,
    place_branches,
    round_s,
    uncompressed_bytes,
    update_bytes,
)
from share_compute.planning.plan import BranchPlan, Plan
from share_compute.planning.planner import Solution, solve
from share_compute.planning.ranges import merge_s, range_machines, ranges_of
from share_compute.planning.report import BranchIsland, RoundsPrediction
from share_compute.specification import TrainJob
from share_compute.specification.compression import NoCompressionSpec
from share_compute.specification.synchronization import AllReduceSpec, BranchesSpec
from share_compute.topology import Topology

LEAST_GAIN = 0.1
"""Smallest fraction of a round's time for which branches move to other machines."""


def plan_rounds(
    spec: TrainJob, topology: Topology, profile: ModelProfile
) -> tuple[Solution, RoundsPrediction, Topology]:
    """Return the result of `plan_places` for the best places, with a comparison with lockstep.

    Args:
        spec: a job with branches.
        topology: the machines, real or hypothetical.
        profile: cost profile of the job's model.

    Raises:
        PlanInfeasible, UserError: as `place_branches`.
    """
    solution, figures, island = plan_places(spec, topology, profile, place_branches(spec, topology, profile))
    lockstep = _lockstep_samples_per_s(spec, topology, profile)
    return solution, figures.model_copy(update={"lockstep_samples_per_s": lockstep}), island


def plan_places(
    spec: TrainJob, topology: Topology, profile: ModelProfile, places: Sequence[BranchPlace]
) -> tuple[Solution, RoundsPrediction, Topology]:
    """Return the solution of the first branch with the plans of all branches, the figures, and the first island.

    If the job lets the planner choose compressed boundaries, the plan of the first branch decides for all branches.
    """
    islands = [island_topology(topology, place) for place in places]
    first = solve(spec, islands[0], profile, 0, {})
    others = spec.with_first_boundaries(first.plan.boundaries)
    solutions = [first, *(solve(others, island, profile, 0, {}) for island in islands[1:])]
    steps_s = [
        None if solution.plan.prediction is None else solution.plan.prediction.step_s
        for solution in solutions
    ]
    idle = [machine for solution in solutions for machine in solution.plan.idle]
    plan = solutions[0].plan.model_copy(
        update={
            "branches": tuple(
                BranchPlan(number=number, stages=solution.plan.stages, step_s=step_s)
                for place, solution, step_s in zip(places, solutions, steps_s, strict=True)
                for number in place.branches
            ),
            "idle": (*idle, *idle_machines(topology, places)),
        }
    )
    figures = _predict(spec, topology, profile, places, steps_s)
    return replace(solutions[0], plan=plan), figures, islands[0]


@dataclass(frozen=True, slots=True)
class Move:
    """Better places for the branches of a running job."""

    places: tuple[BranchPlace, ...]
    plan: Plan
    round_s: float
    """Predicted time of a round with these places."""
    current_round_s: float
    """Predicted time of a round with the places that the branches have."""
    move_s: float
    """Predicted time in which the branches that change their machines move their state."""


def better_places(
    spec: TrainJob, topology: Topology, profile: ModelProfile, current: Sequence[BranchPlace], left: int
) -> Move | None:
    """Return places whose gain in the remaining rounds exceeds the cost of moving; None if there are none.

    Branches that can stay on their machines stay there.

    Args:
        spec: a job with branches.
        topology: the machines that the job may use from now on.
        profile: cost profile of the job's model.
        current: the present places of the branches; their machines may be gone.
        left: number of remaining rounds.
    """
    try:
        places = _renumbered(place_branches(spec, topology, profile), current)
        solution, figures, _ = plan_places(spec, topology, profile, places)
    except PlanInfeasible:
        return None
    policy = spec.training.rounds
    assert policy is not None
    moved_bytes = figures.contribution_bytes + figures.update_bytes
    _, rounds_s = _times(policy, topology, current, [place.step_s for place in current], moved_bytes)
    before_s = max(known_s for known_s in rounds_s if known_s is not None)
    before = {number: place.machines for place in current for number in place.branches}
    moved = [
        place for place in places if any(before.get(number) != place.machines for number in place.branches)
    ]
    if figures.round_s is None or not moved:
        return None
    state_bytes = (1 + spec.training.state_tensors) * uncompressed_bytes(profile)
    move_s = max(
        exchange_s(topology, place.machines, 2 * len(place.branches) * state_bytes) for place in moved
    )
    gain_s = before_s - figures.round_s
    if gain_s < LEAST_GAIN * before_s or gain_s * left <= move_s:
        return None
    return Move(places, solution.plan, figures.round_s, before_s, move_s)


def _renumbered(places: Sequence[BranchPlace], current: Sequence[BranchPlace]) -> tuple[BranchPlace, ...]:
    """Return the same places, but with branches on the places where they already are, as far as possible."""
    held = {place.machines: list(place.branches) for place in current}
    stays = [held.get(place.machines, [])[: len(place.branches)] for place in places]
    others = iter(sorted({number for place in places for number in place.branches}.difference(*stays)))
    return tuple(
        replace(place, branches=tuple(sorted([*kept, *islice(others, len(place.branches) - len(kept))])))
        for place, kept in zip(places, stays, strict=True)
    )


def _predict(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    places: Sequence[BranchPlace],
    steps_s: Sequence[float | None],
) -> RoundsPrediction:
    training, policy = spec.training, spec.training.rounds
    assert policy is not None
    up, down = contribution_bytes(training, profile), update_bytes(training, profile)
    exchanges_s, rounds_s = _times(policy, topology, places, steps_s, up + down)
    longest_s = max((each_s for each_s in rounds_s if each_s is not None), default=None)
    plain = uncompressed_bytes(profile)
    ranges = ranges_of(spec, topology, profile)
    return RoundsPrediction(
        islands=tuple(
            BranchIsland(
                machines=tuple(topology[machine].name for machine in place.machines),
                branches=place.branches,
                step_s=step_s,
                round_s=each_s,
            )
            for place, step_s, each_s in zip(places, steps_s, rounds_s, strict=True)
        ),
        every=policy.every,
        contribution_bytes=up,
        update_bytes=down,
        uncompressed_bytes=plain,
        exchange_s=max(exchanges_s) if topology.links else None,
        range_machines=tuple(topology[machine].name for machine in range_machines(topology)[:ranges]),
        merge_s=merge_s(spec, topology, profile, ranges),
        round_s=longest_s,
        samples_per_s=policy.branches * training.batch_size * policy.every / longest_s if longest_s else None,
        lockstep_bytes=round(2 * (policy.branches - 1) / policy.branches * plain),
    )


def _times(
    policy: BranchesSpec,
    topology: Topology,
    places: Sequence[BranchPlace],
    steps_s: Sequence[float | None],
    moved_bytes: int,
) -> tuple[list[float], list[float | None]]:
    """Return the predicted seconds of each island's exchange with the server, and of its rounds.

    Args:
        policy: options of the policy.
        topology: the machines.
        places: the islands and their branches.
        steps_s: time of one step of one branch on each island; None if unknown; the round's time is then None, too.
        moved_bytes: bytes that each branch sends and receives in a round.
    """
    exchanges_s = [
        exchange_s(topology, place.machines, len(place.branches) * moved_bytes) for place in places
    ]
    rounds_s = [
        None if step_s is None else round_s(policy, len(place.branches), step_s, exchanged_s)
        for place, step_s, exchanged_s in zip(places, steps_s, exchanges_s, strict=True)
    ]
    return exchanges_s, rounds_s


def in_lockstep(spec: TrainJob, branches: int) -> TrainJob:
    """Return the job without rounds, whose step has the batches of ``branches`` branches."""
    training = spec.training
    together = {
        "batch_size": branches * training.batch_size,
        "microbatches": None if training.microbatches is None else branches * training.microbatches,
        "synchronization": AllReduceSpec(),
        "compression": training.compression if training.rounds is None else NoCompressionSpec(),
    }
    return spec.model_copy(update={"training": training.model_copy(update=together)})


def _lockstep_samples_per_s(spec: TrainJob, topology: Topology, profile: ModelProfile) -> float | None:
    """Return the samples/s of a lockstep plan for all machines, whose step has the batches of all branches."""
    assert spec.training.rounds is not None
    together = in_lockstep(spec, spec.training.rounds.branches)
    try:
        prediction = solve(together, topology, profile, 0, {}).plan.prediction
    except PlanInfeasible:
        return None
    return None if prediction is None else prediction.samples_per_s
