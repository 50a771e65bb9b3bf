"""Makes training plans: chooses among the layouts of a strategy, and explains the choice."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

from share_compute.errors import UserError
from share_compute.models.profiles.profile import FLOAT_BYTES, ModelProfile
from share_compute.planning.cost.bound import lower_bound_s
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout
from share_compute.planning.cost.schedule_simulator import StepTimeline, simulate_step
from share_compute.planning.cost.timings import Timings
from share_compute.planning.explain.explanation import Explanation
from share_compute.planning.explain.infeasible import infeasible
from share_compute.planning.network.regions import complete
from share_compute.planning.pinned import pinned_layout, require_finite, require_same_microbatches
from share_compute.planning.plan import (
    NOT_MEASURED,
    PINNED,
    IdleMachine,
    MemberPlan,
    Plan,
    Prediction,
    StagePlan,
)
from share_compute.planning.search.additions import Additions
from share_compute.planning.search.choice import Choice, Proposal, least_penalized, rounded
from share_compute.planning.search.counts import worth_searching
from share_compute.planning.search.partitioning import Candidate, PartitioningStrategy, load_strategy
from share_compute.planning.search.problem import SearchProblem
from share_compute.planning.search.strategies import (
    AutoPartitioning,
    RecursivePartitioning,
    SearchingStrategy,
    is_measured,
    with_nominal_speeds,
)
from share_compute.planning.search.thorough import proposed, thorough
from share_compute.planning.sum_plans import sum_plan
from share_compute.protocol.schedule import blocks
from share_compute.shards import Shard
from share_compute.specification import TrainingSpec, TrainJob
from share_compute.specification.boundaries import (
    BOUNDARY_CODECS,
    NO_BOUNDARY_COMPRESSION,
    BoundaryCodec,
    FixedBoundaryCompressionSpec,
    PlannedBoundaryCompressionSpec,
    fixed_boundaries,
)
from share_compute.specification.workload import TrainingWorkload
from share_compute.topology import Contributor, Topology

_TOKEN_BYTES: Final = 8
"""Bytes of a token id in a sample."""
_LONGER: Final = 0.01
"""Fraction by which less compression may lengthen the predicted step with boundary compression ``auto``."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan, with the cost model, layout and simulated step behind it."""

    plan: Plan
    cost: TrainingCost
    """Cost model of the usable machines, for the plan's number of microbatches."""
    layout: Layout
    """Layout of the plan, with machines as indices into ``cost.topology``."""
    timeline: StepTimeline | None
    """One simulated step; None if no machine's speed was measured."""


def solve(
    spec: TrainJob, topology: Topology, profile: ModelProfile, epoch: int, timings: Timings
) -> Solution:
    """Plan a job on the machines, with the strategy that the job names, or exactly as its pinned plan says.

    Machines whose speed was not measured are left out. If no machine's speed was measured, all machines count as
    equally fast and the plan has no prediction.

    Args:
        spec: the job; if it does not set the number of microbatches, the planner chooses it.
        topology: the machines that the job may use, and the links between them.
        profile: cost profile of the job's model.
        epoch: epoch that is copied into the plan.
        timings: measured times of layers, which replace estimates.

    Raises:
        PlanInfeasible: no plan with the requested numbers of stages and members fits on these machines, or the pinned
            plan cannot be carried out.
        UserError: the model has no parameters, the job compresses a boundary that the model does not have, there is no
            such strategy, or its partitions are invalid.
    """
    if spec.training.boundary_compression.name == "auto":
        found = _least_compressed(spec, topology, profile, timings)
    else:
        found = _search(spec, topology, profile, timings)
    return _finish(spec, topology, epoch, found)


class _Found(NamedTuple):
    """The result of a search for a layout."""

    problems: list[SearchProblem]
    proposals: list[Proposal]
    """All proposals, best by the cost formula first."""
    chosen: Proposal
    timeline: StepTimeline | None
    additions: Additions


def _search(spec: TrainJob, topology: Topology, profile: ModelProfile, timings: Timings) -> _Found:
    problems = search_problems(spec, topology, profile, timings)
    strategy = load_strategy(spec.parallelism.strategy)
    additions = Additions()
    pinned = spec.parallelism.plan
    if pinned is not None:
        known = spec.training.microbatches
        require_same_microbatches(pinned, None if known is None else known * spec.parallelism.sequence)
        (problem,) = problems
        layout = pinned_layout(pinned, problem, topology)
        proposal = Proposal(problem.cost, Candidate(layout), problem.cost.step_s(layout))
        timeline = None
        if any(map(is_measured, topology.contributors)):
            timeline = simulate_step(problem.cost, layout)
            require_finite(timeline.step_s)
        return _Found(problems, [proposal], proposal, timeline, additions)
    if not any(map(is_measured, topology.contributors)):
        proposals = _proposals(strategy, problems)
        return _Found(problems, proposals, proposals[0], None, additions)
    choice = _choose(strategy, problems, additions)
    proposals = sorted(choice.proposals, key=lambda proposal: proposal.preference)
    chosen, timeline = choice.best
    if math.isinf(timeline.step_s):
        raise infeasible(strategy, problems[-1], chosen.candidate.layout)
    return _Found(problems, proposals, chosen, timeline, additions)


def _least_compressed(spec: TrainJob, topology: Topology, profile: ModelProfile, timings: Timings) -> _Found:
    """Return the search result with the least compression at which no link limits the step.

    The step is at most `_LONGER` longer than with int8 at all boundaries. If no speed was measured, nothing is
    compressed.
    """
    plain = _search(spec.with_boundaries(NO_BOUNDARY_COMPRESSION), topology, profile, timings)
    if plain.timeline is None:
        return plain
    most = spec.with_boundaries(PlannedBoundaryCompressionSpec(name="int8"))
    found = _search(most, topology, profile, timings)
    assert found.timeline is not None
    limit_s = found.timeline.step_s * (1 + _LONGER)
    if plain.timeline.step_s <= limit_s:
        return plain
    cost, layout = found.chosen.cost, found.chosen.candidate.layout
    hops_s = {after.start: cost.hop_s(before, after) for before, after in pairwise(layout.stages)}
    codecs: dict[int, BoundaryCodec] = dict.fromkeys(hops_s, "int8")
    chosen, timeline = found.chosen, found.timeline
    for layer in sorted(hops_s, key=lambda layer: (hops_s[layer], layer)):  # fast links first
        for codec in BOUNDARY_CODECS:
            tried = {**codecs, layer: codec}
            workload = replace(cost.workload, boundaries=fixed_boundaries(tried))
            relaxed = replace(cost, workload=workload)
            step = simulate_step(relaxed, layout)
            if step.step_s <= limit_s or tried == codecs:
                codecs, timeline = tried, step
                chosen = Proposal(relaxed, found.chosen.candidate, relaxed.step_s(layout))
                break
    return found._replace(chosen=chosen, timeline=timeline)


def search_problems(
    spec: TrainJob, topology: Topology, profile: ModelProfile, timings: Timings
) -> list[SearchProblem]:
    """Return the search problems of a job: one for each number of microbatches that may be chosen.

    The arguments are those of `solve`.

    Raises:
        PlanInfeasible: the job requests several stages, and its model cannot be cut.
        UserError: the model has no parameters, or the job compresses a boundary that the model does not have.
    """
    if profile.parameters == 0:
        raise UserError("the model has no parameters to train", hint="add a layer that has some, e.g. linear")
    _require_boundaries(spec, len(profile.layers))
    measured = any(map(is_measured, topology.contributors))
    usable = with_nominal_speeds(topology.with_ranks(spec.parallelism.tensor, is_training=True))
    network = complete(usable)
    return [
        SearchProblem(
            TrainingCost(profile, usable, network, workload(spec, microbatches), timings),
            stages=_stages(spec, usable, profile, measured=measured),
            members_per_stage=spec.parallelism.stage_size or (None if measured else 1),
        )
        for microbatches in microbatch_choices(spec)
    ]


def _require_boundaries(spec: TrainJob, layers: int) -> None:
    boundaries = spec.training.boundary_compression
    if isinstance(boundaries, FixedBoundaryCompressionSpec) and max(boundaries.layers, default=0) >= layers:
        raise UserError(
            f"training.boundary_compression: there is no layer {max(boundaries.layers)}: the model has {layers} layers",
            hint=f"name layers from 1 to {layers - 1}" if layers > 1 else "name no layer",
        )


def _run_bytes(training: TrainingSpec) -> float:
    from share_compute.compression.factory import run_bytes  # noqa: PLC0415 - loads torch

    return run_bytes(training)


def workload(spec: TrainJob, microbatches: int) -> TrainingWorkload:
    """Return the input of the cost model for a job with this number of microbatches."""
    training = spec.training
    return TrainingWorkload(
        batch_size=training.batch_size,
        microbatches=microbatches,
        sequence_length=training.sequence_length if spec.reads_tokens else 1,
        optimizer_tensors=training.optimizer.name.state_tensors,
        branch_tensors=training.branch_tensors,
        dtype=training.precision,
        activation_checkpointing=training.activation_checkpointing,
        boundaries=training.boundary_compression,
        # Members exchange shares of the gradients directly, as in the algorithm "sharded".
        collective="sharded" if spec.parallelism.shares_optimizer else training.collective,
        shares_optimizer=spec.parallelism.shares_optimizer,
        run_bytes=_run_bytes(training) if training.compresses_sums else None,
        backups=spec.parallelism.backups,
        slices=spec.parallelism.sequence,
        ranks=spec.parallelism.tensor,
        batch_bytes=training.batch_size * _input_bytes(spec) if spec.data.slicing == "full_batch" else 0.0,
    )


def _input_bytes(spec: TrainJob) -> float:
    """Return the bytes of one sample's input; 0.0 for tables, whose rows are small and unknown before they are read."""
    if spec.data.images is not None:
        return FLOAT_BYTES * math.prod(spec.data.image_shape)
    texts = 2 if spec.data.pairs is not None else 1
    return texts * _TOKEN_BYTES * spec.training.sequence_length if spec.data.is_text else 0.0


def microbatch_choices(spec: TrainJob) -> list[int]:
    """Return the candidate numbers of microbatches: the number that the job or its pinned plan sets, or all divisors.

    Each slice of a sequence counts as one microbatch. The divisors are those of the batch size. Divisors below the
    required number of members per stage are left out, except the batch size itself.
    """
    training, slices = spec.training, spec.parallelism.sequence
    if spec.parallelism.plan is not None:
        return [spec.parallelism.plan.microbatches]
    if training.microbatches is not None:
        return [training.microbatches * slices]
    if slices > 1:
        return [number * slices for number in _divisors(training.batch_size)]
    least = min(spec.parallelism.members_per_stage or 1, training.batch_size)
    return [number for number in _divisors(training.batch_size) if number >= least]


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _stages(spec: TrainJob, usable: Topology, profile: ModelProfile, *, measured: bool) -> int | None:
    """Return the number of stages that the plan must have; None leaves it to the search.

    If the job requests no number and no speed was measured, this is the largest number that machines and layers allow.

    Raises:
        PlanInfeasible: the job requests several stages, and its model cannot be cut.
    """
    requested = profile.require_stages(spec.parallelism.stages)
    if requested is not None or measured:
        return requested
    size = spec.parallelism.stage_size or 1
    return max(1, min(len(usable.contributors) // size, len(profile.layers)))


def _choose(strategy: PartitioningStrategy, problems: list[SearchProblem], additions: Additions) -> Choice:
    """Choose among a strategy's layouts by simulated step time, for machines with measured speeds.

    Raises:
        PlanInfeasible: no layout fits.
    """
    if isinstance(strategy, AutoPartitioning):
        choice = thorough(problems, additions)
        if not choice:
            # The last problem has the smallest microbatches, so its activations need the least memory.
            raise infeasible(strategy, problems[-1], None)
        return choice
    choice = Choice()
    choice.offer(_proposals(strategy, problems))
    return choice


def _proposals(strategy: PartitioningStrategy, problems: list[SearchProblem]) -> list[Proposal]:
    """Return a strategy's proposals that fit into memory and need no dead link, best by the cost formula first.

    Only the proposals with the strategy's smallest penalty are returned.

    Raises:
        PlanInfeasible: there is no such proposal.
    """
    found: list[Proposal] = []
    tried: list[Layout] = []
    if isinstance(strategy, SearchingStrategy) and not isinstance(strategy, RecursivePartitioning):
        problems = worth_searching(problems)
    for problem in problems:
        candidates = strategy.place(problem)
        tried += [candidate.layout for candidate in candidates]
        found += proposed(problem, candidates)
    if not found:
        raise infeasible(strategy, problems[-1], tried[-1] if tried else None)
    return sorted(least_penalized(found), key=lambda proposal: proposal.preference)


def _finish(
    spec: TrainJob,
    topology: Topology,
    epoch: int,
    found: _Found,
) -> Solution:
    problems, proposals, chosen, timeline, additions = found
    cost, layout = chosen.cost, chosen.candidate.layout
    bounds_s = [lower_bound_s(problem.cost) for problem in problems]
    proved = {id(proposal.cost) for proposal in proposals if proposal.candidate.exact}
    exact = (
        chosen.candidate.exact
        and rounded(chosen.formula_s) <= rounded(proposals[0].formula_s)
        and all(
            id(problem.cost) in proved or bound_s >= chosen.formula_s
            for problem, bound_s in zip(problems, bounds_s, strict=True)
        )
    )
    strategy = spec.parallelism.strategy if spec.parallelism.plan is None else PINNED
    explanation = Explanation(
        cost,
        layout,
        timeline,
        requested=(problems[0].stages, problems[0].members_per_stage),
        strategy=strategy,
        exact=exact,
        additions=additions,
    )
    prediction = None
    if timeline is not None:
        prediction = _predict(
            cost,
            timeline,
            formula_s=chosen.formula_s,
            bound_s=min(bounds_s),
            exact=exact,
            explanation=explanation,
        )
    plan = Plan(
        epoch=epoch,
        model_id=spec.name,
        strategy=strategy,
        num_layers=cost.num_layers,
        parameters=cost.profile.parameters,
        model_digest=cost.profile.digest,
        places=cost.profile.places,
        stages=tuple(_stage_plans(spec, cost, layout, timeline, explanation)),
        microbatches=cost.workload.microbatches,
        idle=tuple(_idle(topology, cost, layout, explanation)),
        prediction=prediction,
    )
    return Solution(plan, cost, layout, timeline)


def _predict(
    cost: TrainingCost,
    timeline: StepTimeline,
    *,
    formula_s: float,
    bound_s: float,
    exact: bool,
    explanation: Explanation,
) -> Prediction:
    samples_per_s = cost.workload.batch_size / timeline.step_s
    return Prediction(
        step_s=timeline.step_s,
        formula_s=formula_s,
        lower_bound_s=bound_s,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * cost.workload.sequence_length,
        bottleneck=explanation.bottleneck(),
        exact=exact,
        links_assumed=cost.network.assumed,
    )


def _stage_plans(
    spec: TrainJob,
    cost: TrainingCost,
    layout: Layout,
    timeline: StepTimeline | None,
    explanation: Explanation,
) -> Iterable[StagePlan]:
    for place, stage in enumerate(layout.stages):
        members = []
        for index, (machine, owned) in enumerate(zip(stage.members, blocks(stage.shares), strict=True)):
            contributor = cost.topology.contributors[machine]
            members.append(
                MemberPlan(
                    contributor_id=contributor.id,
                    name=contributor.name,
                    microbatches=owned,
                    memory_bytes=math.ceil(cost.member_bytes(layout, place, index)),
                    lent_bytes=contributor.memory_bytes,
                    busy_fraction=timeline.busy_fractions[machine] if timeline is not None else None,
                    reason=explanation.why_in(place, index),
                    standing=explanation.standing(place, index),
                )
            )
        shard = Shard(spec.name, stage.start, stage.stop, cost.num_layers)
        is_last, is_summed = stage.stop == cost.num_layers, len(stage.members) > 1
        yield StagePlan(
            start=stage.start,
            stop=stage.stop,
            parameters=cost.profile.parameters_of(shard),
            members=tuple(members),
            boundary_codec="none" if is_last else cost.workload.boundaries.codec(stage.stop),
            boundary_bytes=None if is_last else math.ceil(cost.link_bytes[stage.stop]),
            sum_codec=spec.training.compression.name
            if is_summed and spec.training.compresses_sums
            else "none",
            sums=sum_plan(cost, stage.start, stage.stop, stage.members),
        )


def _idle(
    topology: Topology, cost: TrainingCost, layout: Layout, explanation: Explanation
) -> Iterable[IdleMachine]:
    place = {machine.id: index for index, machine in enumerate(cost.topology.contributors)}
    used = set(layout.machines)
    reasons = explanation.why_out([index for index in place.values() if index not in used])
    for index, reason in reasons.items():
        yield _idle_machine(cost.topology.contributors[index], reason)
    for machine in topology.contributors:
        if machine.id not in place:
            yield _idle_machine(machine, NOT_MEASURED)


def _idle_machine(machine: Contributor, reason: str) -> IdleMachine:
    return IdleMachine(contributor_id=machine.id, name=machine.name, reason=reason)
