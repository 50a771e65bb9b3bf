"""Compares policies of synchronization for one job: lockstep, and rounds with several settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from share_compute.errors import ShareComputeError
from share_compute.models.profiles.profile import FLOAT_BYTES, ModelProfile
from share_compute.planning.branches import (
    contribution_bytes,
    island_topology,
    place_branches,
    update_bytes,
)
from share_compute.planning.plan import StagePlan
from share_compute.planning.planner import Solution, solve
from share_compute.planning.report import PolicyFigures
from share_compute.planning.rounds import in_lockstep, times_of_rounds
from share_compute.specification import TrainJob
from share_compute.specification.compression import (
    SPARSE_LOCO,
    CompressionSpec,
    NoCompressionSpec,
    QuantizationSpec,
)
from share_compute.specification.synchronization import PRESETS, LocalSpec
from share_compute.topology import Topology

_BRANCHES = 2
"""Number of branches in rounds, for jobs that have none."""
_NONE = NoCompressionSpec()
_INT8 = QuantizationSpec(name="int8")
_LOCKSTEP_GIVES_UP = (
    "Nothing of the quality is given up, but each step waits for the slowest machine and link."
)


class _Setting(NamedTuple):
    """A policy of rounds with its compression."""

    policy: str
    spec: LocalSpec
    compression: CompressionSpec
    is_own: bool = False


def compare_policies(spec: TrainJob, topology: Topology, profile: ModelProfile) -> tuple[PolicyFigures, ...]:
    """Return the figures of lockstep, of the job's own rounds, and of rounds with preset settings.

    In lockstep a step has the batches of all branches, so all rows train the same samples. Rounds that are longer than
    the job are shortened to it. Each row of rounds is with compression and without. The fastest rows come first, and
    rows without figures last.

    Args:
        spec: the job. If it has no rounds, its batch is one branch's, and there are two branches.
        topology: the machines; on one machine there is nothing to compare, and the result is empty.
        profile: cost profile of the job's model.
    """
    own = spec.training.synchronization
    if len(topology.contributors) < 2 or own.kind not in {"allreduce", "local"}:
        return ()
    branches = own.branches if isinstance(own, LocalSpec) else _BRANCHES
    found = [_lockstep(spec, branches, topology, profile)]
    found += [_rounds(spec, setting, topology, profile) for setting in _settings(spec, branches)]
    return tuple(sorted(found, key=lambda one: -(one.samples_per_s or -math.inf)))


def _settings(spec: TrainJob, branches: int) -> Iterator[_Setting]:
    training, own = spec.training, spec.training.synchronization
    if isinstance(own, LocalSpec):
        other = _INT8 if training.compression.name == "none" else _NONE
        name = f"rounds of {_steps(own.every)}"
        yield _Setting(name, own, training.compression, is_own=True)
        yield _Setting(name, own, other)
    for preset, codec in (("diloco", _INT8), ("sparse_loco", SPARSE_LOCO)):
        every = min(PRESETS[preset]["every"], training.steps)
        policy = LocalSpec.model_validate({"branches": branches, "preset": preset, "every": every})
        for compression in (codec, _NONE):
            if policy != own or compression != training.compression:
                yield _Setting(f"{preset}, {_steps(every)}", policy, compression)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _lockstep(spec: TrainJob, branches: int, topology: Topology, profile: ModelProfile) -> PolicyFigures:
    is_own = spec.training.synchronization.kind == "allreduce"
    row = PolicyFigures(
        policy="lockstep",
        compression="none",
        is_own=is_own,
        branches=1,
        gives_up=_LOCKSTEP_GIVES_UP,
    )
    try:
        solution = solve(in_lockstep(spec, branches), topology, profile, 0, {})
    except ShareComputeError as failure:
        return row.model_copy(update={"problem": failure.message})
    prediction, moved = solution.plan.prediction, _lockstep_bytes(solution, profile)
    return row.model_copy(
        update={
            "samples_per_s": None if prediction is None else prediction.samples_per_s,
            "sent_bytes_per_step": moved,
            "received_bytes_per_step": moved,
            "utilisation": _mean(_busy(solution.plan.stages)),
        }
    )


def _lockstep_bytes(solution: Solution, profile: ModelProfile) -> float:
    """Return the bytes that the busiest machine sends in a step; it receives as many.

    These are activations and gradients at the boundaries of its stage, and its part of a ring that sums gradients.
    """
    plan, boundary = solution.plan, solution.cost.boundary_bytes
    most = 0.0
    for stage in plan.stages:
        size = len(stage.members)
        summed = 2 * (size - 1) / size * FLOAT_BYTES * _trained(profile, stage)
        crossing = float(boundary[stage.start] + boundary[stage.stop])
        most = max(most, *(summed + len(member.microbatches) * crossing for member in stage.members))
    return most


def _trained(profile: ModelProfile, stage: StagePlan) -> int:
    pieces = list(profile.layers[stage.start : stage.stop])
    if stage.start == 0:
        pieces.append(profile.embedding)
    if stage.stop == len(profile.layers):
        pieces.append(profile.head)
    return sum(piece.parameters - piece.frozen for piece in pieces)


def _rounds(spec: TrainJob, setting: _Setting, topology: Topology, profile: ModelProfile) -> PolicyFigures:
    policy, training = setting.spec, spec.training
    update = {"synchronization": policy, "compression": setting.compression}
    job = spec.model_copy(update={"training": training.model_copy(update=update)})
    row = PolicyFigures(
        policy=setting.policy,
        compression=setting.compression.name,
        is_own=setting.is_own,
        branches=policy.branches,
        gives_up=_gives_up(setting),
    )
    try:
        places = place_branches(job, topology, profile)
        plans = [solve(job, island_topology(topology, place), profile, 0, {}).plan for place in places]
    except ShareComputeError as failure:
        return row.model_copy(update={"problem": failure.message})
    steps_s = [None if plan.prediction is None else plan.prediction.step_s for plan in plans]
    _, rounds_s = times_of_rounds(job, topology, profile, places, steps_s)
    known_s = [round_s for round_s in rounds_s if round_s is not None]
    samples = policy.branches * training.batch_size * policy.every
    busy = [
        share * len(place.branches) * policy.every * step_s / max(known_s)
        for place, plan, step_s in zip(places, plans, steps_s, strict=True)
        if step_s is not None
        for share in _busy(plan.stages)
    ]
    return row.model_copy(
        update={
            "samples_per_s": samples / max(known_s) if known_s else None,
            "sent_bytes_per_step": contribution_bytes(job.training, profile) / policy.every,
            "received_bytes_per_step": update_bytes(job.training, profile) / policy.every,
            "utilisation": _mean(busy),
        }
    )


def _gives_up(setting: _Setting) -> str:
    every, codec = setting.spec.every, setting.compression
    if every == 1:
        apart = "The optimizer of each branch sees only its own gradients"
    else:
        apart = f"Branches train apart for {every} steps, which may cost quality"
    if isinstance(codec, NoCompressionSpec):
        return f"{apart}."
    lost = "are lost" if codec.error_feedback is None else "wait for a later round"
    return f"{apart}, and small changes of the weights {lost}."


def _busy(stages: Sequence[StagePlan]) -> list[float]:
    """Return the predicted share of a step in which each member computes; members without one are left out."""
    members = [member for stage in stages for member in stage.members]
    return [member.busy_fraction for member in members if member.busy_fraction is not None]


def _mean(shares: Sequence[float]) -> float | None:
    return sum(shares) / len(shares) if shares else None
