"""Place a deployment on machines, and compute the limits of its scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from share_compute.errors import PlanInfeasible
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.network.regions import complete
from share_compute.planning.plan import Plan, layer_span
from share_compute.planning.report import ServingPrediction
from share_compute.planning.search.strategies import with_nominal_speeds
from share_compute.planning.serving.cost import PROCESS_BYTES, ServingCost
from share_compute.planning.serving.plan import plan_serving
from share_compute.protocol.membership import Worker
from share_compute.quantities import listed
from share_compute.shards import Shard
from share_compute.specification import ServeJob
from share_compute.specification.workload import STEP_TOKENS, ServingWorkload, serving_workload
from share_compute.topology import Topology

_LEAST_STEP_TOKENS = 16
_CHUNK_TOKENS = 128
"""Smallest chunk of a prompt, in tokens, that uses a machine efficiently."""
_MOST_QUEUED = 512
"""Maximum number of sequences that wait to start."""
_MOST_QUEUED_TEXTS = 8192
"""Maximum number of texts that wait for an encoder; also the maximum that it computes at a time."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Planned use of one machine's memory, in bytes."""

    usable_bytes: int
    """Memory that a plan may fill."""
    working_bytes: int
    """Memory for intermediate results, without weights and caches."""
    cache_bytes: int
    """Memory left for the caches of sequences, after weights and intermediate results."""
    holds_weights_twice: bool
    """Whether packed weights (reordered for the CPU) fit in addition to plain ones."""

    def beside(self, resident_bytes: int | None) -> int:
        """Return the bytes left for caches; negative if the process takes too much memory.

        Args:
            resident_bytes: memory of the process, as in `Holding`.
        """
        if resident_bytes is None:
            return self.cache_bytes
        return min(self.cache_bytes, self.usable_bytes - self.working_bytes - resident_bytes)


@dataclass(frozen=True, slots=True)
class Holding:
    """A machine's report about the shard that it holds."""

    cache_token_bytes: int
    """Memory that the shard's caches take for one token of a sequence."""
    resident_bytes: int | None
    """Memory of the member's processes, including packed weights that they have yet to create; None if it does not
    compute on the CPU."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A pipeline of machines, each with its shard and its memory budget."""

    prediction: ServingPrediction
    concurrent: int
    """Number of concurrent sequences that the plan is for; at most the requested number."""
    memory_budgets: Mapping[Worker, MemoryBudget]

    @property
    def plan(self) -> Plan:
        """The plan, with its stages in pipeline order."""
        return self.prediction.plan

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The machines, in pipeline order."""
        return tuple(stage.members[0].contributor_id for stage in self.plan.stages)

    @property
    def shards(self) -> dict[Worker, Shard]:
        """Shard of each machine."""
        return {worker: self.plan.shard(index) for index, worker in enumerate(self.workers)}

    def at(self, epoch: int) -> Placement:
        """Return a copy whose plan has this epoch."""
        plan = self.plan.model_copy(update={"epoch": epoch})
        return replace(self, prediction=self.prediction.model_copy(update={"plan": plan}))

    @property
    def sentence(self) -> str:
        """Sentence for users that names the layers of each machine."""
        stages = [
            f"{stage.members[0].name} holds {layer_span(stage.start, stage.stop)}"
            for stage in self.plan.stages
        ]
        return listed(stages)


def window_of(spec: ServeJob, model_window_tokens: int | None) -> int:
    """Return the maximum length of a deployment's sequences in tokens, prompt and answer together.

    This is the smaller of ``max_seq`` and the model's window. If only one is known, return it; if neither is known,
    return ``prompt_tokens`` + ``new_tokens``.
    """
    known = [window for window in (spec.max_seq, model_window_tokens) if window is not None]
    return min(known, default=spec.prompt_tokens + spec.new_tokens)


def place(
    spec: ServeJob,
    topology: Topology,
    profile: ModelProfile,
    *,
    window_tokens: int,
    epoch: int,
    stages: int | None,
    embeds: bool = False,
) -> Placement:
    """Plan the stages of a deployment, for the requested number of concurrent sequences or fewer.

    The requested number is halved until a plan is feasible, down to one sequence. An encoder has no caches, so only the
    requested number is tried.

    Args:
        spec: specification of the deployment.
        topology: machines that may be used.
        profile: sizes and FLOPs of the model's layers.
        window_tokens: longest sequence, in tokens.
        epoch: epoch of the plan.
        stages: number of stages, one machine each; None lets the planner choose.
        embeds: whether the model is an encoder.

    Raises:
        PlanInfeasible: there is no machine, or no plan is feasible.
    """
    if not topology.contributors:
        raise PlanInfeasible("there is no machine", hint="let machines join")
    failure: PlanInfeasible | None = None
    for workload in _workloads(spec, window_tokens, embeds=embeds):
        try:
            found = plan_serving(spec.name, topology, profile, workload, stages=stages, epoch=epoch)
        except PlanInfeasible as lacking:
            failure = lacking
        else:
            return Placement(
                found, workload.concurrent, _memory_budgets(found.plan, topology, profile, workload)
            )
    assert failure is not None
    raise failure


def _workloads(spec: ServeJob, window_tokens: int, *, embeds: bool) -> Iterator[ServingWorkload]:
    """Yield the workloads that `place` tries, with sequences shortened to the window.

    In the only workload of an encoder, each prompt fills an engine step.
    """
    requested = serving_workload(spec)
    if embeds:
        yield replace(requested, prompt_tokens=_text_step_tokens(window_tokens), new_tokens=1)
        return
    length = requested.prompt_tokens + requested.new_tokens
    if length > window_tokens:
        prompt = max(1, window_tokens * requested.prompt_tokens // length)
        requested = replace(requested, prompt_tokens=prompt, new_tokens=max(1, window_tokens - prompt))
    concurrent = requested.concurrent
    while concurrent:
        yield replace(requested, concurrent=concurrent)
        concurrent //= 2


def _memory_budgets(
    plan: Plan, topology: Topology, profile: ModelProfile, workload: ServingWorkload
) -> dict[Worker, MemoryBudget]:
    usable = with_nominal_speeds(topology.with_ranks(workload.ranks))
    with_caches = ServingCost(profile, usable, complete(usable), workload)
    cost = replace(with_caches, workload=replace(workload, concurrent=0))
    place = {machine.id: index for index, machine in enumerate(usable.contributors)}
    memory_budgets = {}
    for stage in plan.stages:
        worker = stage.members[0].contributor_id
        usable_bytes = int(cost.memory_bytes[place[worker]])
        needed_bytes = int(cost.needed_bytes[stage.start, stage.stop])
        packed_bytes = cost.packed_bytes(stage.start, stage.stop)
        spare_bytes = usable_bytes - int(with_caches.needed_bytes[stage.start, stage.stop])
        memory_budgets[worker] = MemoryBudget(
            usable_bytes,
            needed_bytes - int(cost.held_bytes[stage.start, stage.stop]) - cost.process_bytes,
            usable_bytes - needed_bytes,
            holds_weights_twice=spare_bytes >= packed_bytes + PROCESS_BYTES,
        )
    return memory_budgets


def limits_of(
    spec: ServeJob,
    placement: Placement,
    holdings: Mapping[Worker, Holding],
    window_tokens: int,
    shares: Mapping[Worker, float],
    *,
    embeds: bool = False,
) -> SchedulerLimits:
    """Return the scheduler's limits for this placement.

    Args:
        spec: specification of the deployment.
        placement: placement of the model.
        holdings: report of each machine about its shard.
        window_tokens: longest sequence, in tokens.
        shares: fraction of the cache memory to use, by machine; 1 for missing machines. For an encoder, the smallest
            fraction scales the size of engine steps.
        embeds: whether the model is an encoder.

    Raises:
        PlanInfeasible: a machine has no cache memory for a sequence of two tokens; never for an encoder.
    """
    if embeds:
        return _limits_of_texts(window_tokens, len(placement.workers), min(shares.values(), default=1.0))
    fitting = {
        worker: int(shares.get(worker, 1.0) * budget.beside(holdings[worker].resident_bytes))
        // max(1, holdings[worker].cache_token_bytes)
        for worker, budget in placement.memory_budgets.items()
    }
    tightest = min(fitting, key=lambda worker: fitting[worker])
    if fitting[tightest] < 2:
        member = next(
            stage.members[0] for stage in placement.plan.stages if stage.members[0].contributor_id == tightest
        )
        raise PlanInfeasible(
            f"{member.name} has no memory for the KV cache of a sequence beside its shard",
            machine=member.name,
            hint="lend more memory there, or let another machine join",
        )
    return SchedulerLimits(
        window_tokens=window_tokens,
        kv_tokens=fitting[tightest],
        max_sequences=spec.max_concurrent,
        step_tokens=_step_tokens(spec, len(placement.workers)),
        stages=len(placement.workers),
        max_queued=_MOST_QUEUED,
        answer_tokens=spec.new_tokens,
    )


def _step_tokens(spec: ServeJob, stages: int) -> int:
    """Return the maximum number of positions that one engine step computes.

    It is at most ``prompt_tokens``, but at least `_LEAST_STEP_TOKENS`: memory is planned for engine steps of this size.
    """
    most = max(_CHUNK_TOKENS, STEP_TOKENS // stages)
    return min(max(spec.prompt_tokens, _LEAST_STEP_TOKENS), most)


def _limits_of_texts(window_tokens: int, stages: int, share: float = 1.0) -> SchedulerLimits:
    step_tokens = max(_LEAST_STEP_TOKENS, int(share * _text_step_tokens(window_tokens)))
    return SchedulerLimits(
        window_tokens=window_tokens,
        kv_tokens=step_tokens,
        max_sequences=_MOST_QUEUED_TEXTS,
        step_tokens=step_tokens,
        stages=stages,
        max_queued=_MOST_QUEUED_TEXTS,
        embeds=True,
    )


def _text_step_tokens(window_tokens: int) -> int:
    """Return the number of positions in an encoder's engine step; the longest text must fit into one step."""
    return max(window_tokens, STEP_TOKENS)


def limits_before(spec: ServeJob, window_tokens: int, *, embeds: bool = False) -> SchedulerLimits:
    """Return the scheduler's limits for the time before the first stages exist, when all sequences wait."""
    if embeds:
        return _limits_of_texts(window_tokens, 1)
    return SchedulerLimits(
        window_tokens=window_tokens,
        kv_tokens=window_tokens,
        max_sequences=spec.max_concurrent,
        step_tokens=_LEAST_STEP_TOKENS,
        stages=1,
        max_queued=_MOST_QUEUED,
        answer_tokens=spec.new_tokens,
    )
