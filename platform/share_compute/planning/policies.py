"""Compares policies of synchronization for one job: lockstep, and rounds with several settings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from share_compute.errors import ShareComputeError
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.branches import contribution_bytes, neighbours, place_branches, update_bytes
from share_compute.planning.plan import StagePlan
from share_compute.planning.planner import Solution, solve
from share_compute.planning.report import PolicyFigures
from share_compute.planning.rounds import in_lockstep, plan_places
from share_compute.specification import TrainJob
from share_compute.specification.compression import (
    SPARSE_LOCO,
    CompressionSpec,
    NoCompressionSpec,
    QuantizationSpec,
)
from share_compute.specification.synchronization import (
    PRESETS,
    BranchesSpec,
    ElasticSpec,
    GossipSpec,
    Graph,
    LocalSpec,
    ParameterServerSpec,
)
from share_compute.topology import Topology

_BRANCHES = 2
"""Number of branches in rounds, for jobs that have none."""
_STALENESS = (0, 1)
"""Options ``staleness`` of a parameter server that are compared: synchronous and bounded."""
_GRAPHS: Final[tuple[Graph, ...]] = ("ring", "exponential", "random_pairs", "measured")
_NONE = NoCompressionSpec()
_INT8 = QuantizationSpec(name="int8")
_LOCKSTEP_GIVES_UP = (
    "Nothing of the quality is given up, but each step waits for the slowest machine and link."
)


class _Setting(NamedTuple):
    """A policy of rounds with its compression."""

    policy: str
    spec: BranchesSpec
    compression: CompressionSpec
    is_own: bool = False


def compare_policies(spec: TrainJob, topology: Topology, profile: ModelProfile) -> tuple[PolicyFigures, ...]:
    """Return the figures of lockstep, of the job's own rounds, of the presets of local steps, and of other policies.

    In lockstep a step has the batches of all branches, so all rows train the same samples. Rounds that are longer than
    the job are shortened to the job's length. The job's own rounds and the presets appear with and without compression.
    Graphs of gossip with the same edges have one row. The fastest rows come first, and rows without figures last.

    Args:
        spec: the job; its pinned plan is ignored. If it has no rounds, its batch is one branch's, and there are two
            branches.
        topology: the machines; on one machine there is nothing to compare, and the result is empty.
        profile: cost profile of the job's model.
    """
    if len(topology.contributors) < 2:
        return ()
    spec = spec.without_pinned_plan()
    own = spec.training.rounds
    branches = _BRANCHES if own is None else own.branches
    found = [
        _lockstep(spec, branches, topology, profile),
        *_Comparison(spec, topology, profile).rows(branches),
    ]
    return tuple(sorted(found, key=lambda one: -(one.samples_per_s or -math.inf)))


class _Comparison:
    """Rows of policies with rounds. Policies that differ only in the computation of a merge are planned once."""

    def __init__(self, spec: TrainJob, topology: Topology, profile: ModelProfile) -> None:
        self._spec, self._topology, self._profile = spec, topology, profile
        self._known: dict[tuple[int, ...], dict[str, Any]] = {}

    def rows(self, branches: int) -> Iterator[PolicyFigures]:
        """Yield a row for each setting."""
        seen: set[tuple[str, str]] = set()
        for setting in (*self._own(), *self._presets(branches), *self._others(branches)):
            if (setting.policy, setting.compression.name) not in seen:
                seen.add((setting.policy, setting.compression.name))
                yield self._row(setting)

    def _own(self) -> Iterator[_Setting]:
        training, own = self._spec.training, self._spec.training.rounds
        if own is not None:
            other = _INT8 if training.compression.name == "none" else _NONE
            yield _Setting(_name(own), own, training.compression, is_own=True)
            yield _Setting(_name(own), own, other)

    def _presets(self, branches: int) -> Iterator[_Setting]:
        training = self._spec.training
        for preset, codec in (("diloco", _INT8), ("sparse_loco", SPARSE_LOCO)):
            every = min(PRESETS[preset]["every"], training.steps)
            policy = LocalSpec.model_validate({"branches": branches, "preset": preset, "every": every})
            for compression in (codec, _NONE):
                if policy != training.rounds or compression != training.compression:
                    yield _Setting(preset, policy, compression)

    def _others(self, branches: int) -> Iterator[_Setting]:
        """Yield the other policies, in rounds as long as the job's own and with its codec.

        A job without rounds is compared with these policies' default rounds, with int8 compression.
        """
        training, own = self._spec.training, self._spec.training.rounds
        codec = _INT8 if own is None else training.compression
        policies: list[BranchesSpec] = [ElasticSpec(branches=branches, rate=min(0.1, 1 / branches))]
        policies += self._gossip(branches)
        policies += [ParameterServerSpec(branches=branches, staleness=number) for number in _STALENESS]
        for policy in policies:
            every = min(policy.every if own is None else own.every, training.steps)
            shortened = policy.model_copy(update={"every": every})
            yield _Setting(_name(shortened), shortened, codec)

    def _gossip(self, branches: int) -> Iterator[GossipSpec]:
        """Yield gossip on each graph whose edges are not those of an earlier one; none for a single branch."""
        from share_compute.synchronization.graphs import edges_of  # noqa: PLC0415 - loads torch

        seen = []
        for graph in _GRAPHS if branches > 1 else ():
            policy, measured = GossipSpec(branches=branches, graph=graph), []
            if graph == "measured":
                if not self._topology.links:
                    continue
                try:
                    places = place_branches(self._job(policy, _NONE), self._topology, self._profile)
                except ShareComputeError:
                    continue  # the rows of other graphs say why
                measured = neighbours(self._topology, places)
            edges = edges_of(graph, branches, self._spec.training.seed, 1, measured)
            if edges not in seen or (graph == "random_pairs" and branches > 2):
                yield policy
            seen.append(edges)

    def _job(self, policy: BranchesSpec, compression: CompressionSpec) -> TrainJob:
        update = {"synchronization": policy, "compression": compression}
        training = self._spec.training.model_copy(update=update)
        return self._spec.model_copy(update={"training": training})

    def _row(self, setting: _Setting) -> PolicyFigures:
        policy, job = setting.spec, self._job(setting.spec, setting.compression)
        up, down = contribution_bytes(job.training, self._profile), update_bytes(job.training, self._profile)
        key = (policy.branches, policy.every, policy.overlapping, job.training.branch_tensors, up, down)
        if key not in self._known:
            self._known[key] = self._planned(job)
        return PolicyFigures(
            policy=setting.policy,
            compression=setting.compression.name,
            is_own=setting.is_own,
            branches=policy.branches,
            every=policy.every,
            gives_up=_gives_up(setting),
            **self._known[key],
        )

    def _planned(self, job: TrainJob) -> dict[str, Any]:
        """Return the figures of a job with rounds, or the reason why it has no plan."""
        try:
            places = place_branches(job, self._topology, self._profile)
            solution, figures, _ = plan_places(job, self._topology, self._profile, places)
        except ShareComputeError as failure:
            return {"problem": failure.message}
        busy = defaultdict[str, float](float)
        for branch in solution.plan.branches:
            for stage in branch.stages:
                for member in stage.members:
                    if member.busy_fraction is not None and branch.step_s is not None and figures.round_s:
                        busy[member.contributor_id] += (
                            member.busy_fraction * figures.every * branch.step_s / figures.round_s
                        )
        return {
            "samples_per_s": figures.samples_per_s,
            "sent_bytes_per_step": figures.contribution_bytes / figures.every,
            "received_bytes_per_step": figures.update_bytes / figures.every,
            "utilisation": _mean([*busy.values()]),
        }


def _name(policy: BranchesSpec) -> str:
    """Return a short name of a policy, which fits into a table of 80 columns."""
    if isinstance(policy, GossipSpec):
        return f"gossip, {policy.graph}"
    if isinstance(policy, ParameterServerSpec):
        is_bounded = isinstance(policy.staleness, int)
        return f"server, staleness {policy.staleness}" if is_bounded else "server, unbounded"
    return "elastic" if isinstance(policy, ElasticSpec) else "rounds"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _lockstep(spec: TrainJob, branches: int, topology: Topology, profile: ModelProfile) -> PolicyFigures:
    is_own = spec.training.synchronization.kind == "allreduce"
    row = PolicyFigures(
        policy="lockstep",
        compression=spec.training.compression.name if is_own else "none",
        is_own=is_own,
        branches=1,
        gives_up=_LOCKSTEP_GIVES_UP,
    )
    try:
        solution = solve(in_lockstep(spec, branches), topology, profile, 0, {})
    except ShareComputeError as failure:
        return row.model_copy(update={"problem": failure.message})
    prediction, moved = solution.plan.prediction, _lockstep_bytes(solution)
    return row.model_copy(
        update={
            "samples_per_s": None if prediction is None else prediction.samples_per_s,
            "sent_bytes_per_step": moved,
            "received_bytes_per_step": moved,
            "utilisation": _mean(_busy(solution.plan.stages)),
        }
    )


def _lockstep_bytes(solution: Solution) -> float:
    """Return the bytes that the busiest machine sends in a step; it receives as many.

    It sends activations and gradients at the boundaries of its stage, and its part of the gradient sums.
    """
    plan, boundary = solution.plan, solution.cost.boundary_bytes
    most = 0.0
    for stage in plan.stages:
        summed = 0 if stage.sums is None else stage.sums.received_bytes
        crossing = float(boundary[stage.start] + boundary[stage.stop])
        most = max(most, *(summed + len(member.microbatches) * crossing for member in stage.members))
    return most


def _gives_up(setting: _Setting) -> str:
    policy, codec = setting.spec, setting.compression
    apart = f"Branches train apart for {_steps(policy.every)}"
    if isinstance(policy, ElasticSpec):
        found = f"{apart}. A round moves their weights only {policy.rate:.0%} of the way to the centre"
    elif isinstance(policy, GossipSpec):
        found = f"{apart}. A round averages their weights only with {_partners(policy)}"
    elif policy.merges_apart and isinstance(policy, ParameterServerSpec):
        behind = "any number of pushes"
        if isinstance(policy.staleness, int):
            behind = f"up to {policy.staleness + 1} pushes"
        found = f"{apart}, with weights that may lack {behind} of each other branch"
    elif policy.every == 1:
        found = "The optimizer of each branch sees only its own gradients"
    else:
        found = f"{apart}, which may cost quality"
    if isinstance(codec, NoCompressionSpec):
        return f"{found}."
    lost = "are lost" if codec.error_feedback is None else "wait for a later round"
    return f"{found}, and small changes of the weights {lost}."


def _partners(policy: GossipSpec) -> str:
    """Return the branches with which a branch averages, as text for the user."""
    if policy.branches == 2:
        return "one other branch"
    if policy.graph == "random_pairs":
        return "one other branch, drawn anew"
    if policy.graph == "measured":
        return "branches that have fast links"
    powers = 1 if policy.graph == "ring" else (policy.branches - 1).bit_length()
    others = {sign * 2**power % policy.branches for power in range(powers) for sign in (1, -1)}
    return f"{len(others)} other branches"


def _busy(stages: Sequence[StagePlan]) -> list[float]:
    """Return each member's predicted fraction of a step spent computing; members without a prediction are left out."""
    members = [member for stage in stages for member in stage.members]
    return [member.busy_fraction for member in members if member.busy_fraction is not None]


def _mean(shares: Sequence[float]) -> float | None:
    return sum(shares) / len(shares) if shares else None
