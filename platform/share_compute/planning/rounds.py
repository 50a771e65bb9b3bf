"""Plans a job whose branches merge in rounds: one plan for each island, and the predicted figures of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.branches import (
    BranchPlace,
    contribution_bytes,
    exchange_s,
    idle_machines,
    island_topology,
    place_branches,
    uncompressed_bytes,
    update_bytes,
)
from share_compute.planning.plan import BranchPlan
from share_compute.planning.planner import Solution, solve
from share_compute.planning.report import BranchIsland, RoundsPrediction
from share_compute.specification import TrainJob
from share_compute.specification.compression import NoCompressionSpec
from share_compute.specification.synchronization import AllReduceSpec, LocalSpec
from share_compute.topology import Topology


def plan_rounds(
    spec: TrainJob, topology: Topology, profile: ModelProfile
) -> tuple[Solution, RoundsPrediction, Topology]:
    """Return the solution of the first branch with the plans of all branches, the figures, and its island.

    Args:
        spec: a job with ``synchronization: {kind: local}``.
        topology: the machines, real or hypothetical.
        profile: cost profile of the job's model.

    Raises:
        PlanInfeasible, UserError: as `place_branches`.
    """
    places = place_branches(spec, topology, profile)
    islands = [island_topology(topology, place) for place in places]
    solutions = [solve(spec, island, profile, 0, {}) for island in islands]
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


def _predict(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    places: Sequence[BranchPlace],
    steps_s: Sequence[float | None],
) -> RoundsPrediction:
    training, policy = spec.training, spec.training.synchronization
    assert isinstance(policy, LocalSpec)
    up, down, plain = (
        contribution_bytes(training, profile),
        update_bytes(training, profile),
        uncompressed_bytes(profile),
    )
    exchanges_s, rounds_s = times_of_rounds(spec, topology, profile, places, steps_s)
    known_s = [round_s for round_s in rounds_s if round_s is not None]
    samples = policy.branches * training.batch_size * policy.every
    return RoundsPrediction(
        islands=tuple(
            BranchIsland(
                machines=tuple(topology[machine].name for machine in place.machines),
                branches=place.branches,
                step_s=step_s,
                round_s=round_s,
            )
            for place, step_s, round_s in zip(places, steps_s, rounds_s, strict=True)
        ),
        every=policy.every,
        contribution_bytes=up,
        update_bytes=down,
        uncompressed_bytes=plain,
        exchange_s=max(exchanges_s) if topology.links else None,
        round_s=max(known_s, default=None),
        samples_per_s=samples / max(known_s) if known_s else None,
        lockstep_bytes=round(2 * (policy.branches - 1) / policy.branches * plain),
        lockstep_samples_per_s=_lockstep_samples_per_s(spec, policy.branches, topology, profile),
    )


def times_of_rounds(
    spec: TrainJob,
    topology: Topology,
    profile: ModelProfile,
    places: Sequence[BranchPlace],
    steps_s: Sequence[float | None],
) -> tuple[list[float], list[float | None]]:
    """Return the predicted seconds of each island's exchange with the server, and of its rounds.

    Args:
        spec: a job with ``synchronization: {kind: local}``.
        topology: the machines.
        profile: cost profile of the job's model.
        places: the islands and their branches.
        steps_s: time of one step of one branch on each island; None if it is not known, as is the round's time then.
    """
    policy = spec.training.synchronization
    assert isinstance(policy, LocalSpec)
    moved = contribution_bytes(spec.training, profile) + update_bytes(spec.training, profile)
    exchanges_s = [exchange_s(topology, place.machines, len(place.branches) * moved) for place in places]
    rounds_s = [
        None if step_s is None else len(place.branches) * policy.every * step_s + exchanged_s
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
        "compression": NoCompressionSpec(),
    }
    return spec.model_copy(update={"training": training.model_copy(update=together)})


def _lockstep_samples_per_s(
    spec: TrainJob, branches: int, topology: Topology, profile: ModelProfile
) -> float | None:
    """Return samples/s of one plan for all machines, whose step has the batches of all branches."""
    try:
        prediction = solve(in_lockstep(spec, branches), topology, profile, 0, {}).plan.prediction
    except PlanInfeasible:
        return None
    return None if prediction is None else prediction.samples_per_s
