"""Chooses between lockstep and rounds for jobs with ``synchronization: {kind: auto}``."""

from __future__ import annotations

import math
from typing import NamedTuple

from share_compute.errors import PlanInfeasible
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.branches import place_branches, rounds_of
from share_compute.planning.planner import solve
from share_compute.planning.report import PolicyChoice
from share_compute.planning.rounds import in_lockstep, plan_places
from share_compute.specification import TrainJob
from share_compute.specification.synchronization import AutoSpec
from share_compute.topology import Topology

UTILISATION = 0.95
"""Share of a round that the busiest island computes, from which longer rounds are not worth their loss of quality."""
LEAST_SPEEDUP = 1.2
"""Speed of rounds relative to lockstep from which they are worth their loss of quality."""


class _Rounds(NamedTuple):
    """The best rounds."""

    every: int
    samples_per_s: float | None
    """None if no speed was measured."""


def choose_policy(spec: TrainJob, topology: Topology, profile: ModelProfile) -> PolicyChoice | None:
    """Return lockstep, or the shortest rounds that keep the branches computing; None if the job leaves no choice.

    The number of steps of a round is the least within the limits for which the busiest island computes `UTILISATION` of
    the time. It divides the intervals of validations, checkpoints and sample texts. Rounds are chosen if lockstep has
    no plan, or if rounds are predicted to be `LEAST_SPEEDUP` times as fast.

    Args:
        spec: the job.
        topology: the machines, real or hypothetical.
        profile: cost profile of the job's model.

    Raises:
        PlanInfeasible, UserError: neither lockstep nor rounds have a plan.
    """
    policy = spec.training.synchronization
    if not isinstance(policy, AutoSpec):
        return None
    rounds, lockstep, has_lockstep = _best_rounds(spec, policy, topology, profile), None, True
    try:
        prediction = solve(in_lockstep(spec, policy.branches), topology, profile, 0, {}).plan.prediction
        lockstep = None if prediction is None else prediction.samples_per_s
    except PlanInfeasible:
        if rounds is None:
            raise
        has_lockstep = False
    if rounds is None:
        return PolicyChoice(every=None, lockstep_samples_per_s=lockstep)
    speed = rounds.samples_per_s
    is_faster = speed is not None and lockstep is not None and speed >= LEAST_SPEEDUP * lockstep
    return PolicyChoice(
        every=rounds.every if is_faster or not has_lockstep else None,
        rounds_samples_per_s=speed,
        lockstep_samples_per_s=lockstep,
    )


def with_choice(spec: TrainJob, choice: PolicyChoice | None) -> TrainJob:
    """Return the job with the chosen policy in place of ``auto``."""
    policy = spec.training.synchronization
    if choice is None or not isinstance(policy, AutoSpec):
        return spec
    return in_lockstep(spec, policy.branches) if choice.every is None else in_rounds(spec, choice.every)


def in_rounds(spec: TrainJob, least: int | None = None) -> TrainJob:
    """Replace ``auto`` in a job by rounds of at least ``least`` steps, or by the longest allowed rounds."""
    training, policy = spec.training, spec.training.synchronization
    assert isinstance(policy, AutoSpec)
    every = policy.length(
        policy.every if least is None else least, training.steps, [*training.intervals.values()]
    )
    training = training.model_copy(update={"synchronization": policy.local(every)})
    return spec.model_copy(update={"training": training})


def _best_rounds(
    spec: TrainJob, policy: AutoSpec, topology: Topology, profile: ModelProfile
) -> _Rounds | None:
    """Return the rounds to compare with lockstep; None if they have no plan."""
    job = in_rounds(spec)
    try:
        _, figures, _ = plan_places(job, topology, profile, place_branches(job, topology, profile))
    except PlanInfeasible:
        return None
    longest = figures.every
    islands = [
        (len(island.branches) * island.step_s, island.round_s)
        for island in figures.islands
        if island.step_s is not None and island.round_s is not None
    ]
    if len(islands) < len(figures.islands):
        return _Rounds(longest, None)
    # An island computes for a fixed time per step, and exchanges for a fixed time per round of any length.
    times_s = [(computed_s, max(0.0, round_s - longest * computed_s)) for computed_s, round_s in islands]
    busiest_s = max(computed_s for computed_s, _ in times_s)
    least = max(
        math.ceil(UTILISATION * exchanged_s / (busiest_s - UTILISATION * computed_s))
        for computed_s, exchanged_s in times_s
    )
    every = rounds_of(in_rounds(spec, least).training).every
    round_s = max(every * computed_s + exchanged_s for computed_s, exchanged_s in times_s)
    return _Rounds(every, policy.branches * spec.training.batch_size * every / round_s)
