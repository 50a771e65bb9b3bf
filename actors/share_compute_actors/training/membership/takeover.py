"""Finds the surviving members of an attempt whose coordinator died, and the state from which they continue."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from share_compute.errors import ShareComputeError
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout
from share_compute.planning.cost.schedule_simulator import simulate_step
from share_compute.planning.cost.timings import Timings
from share_compute.planning.network.regions import complete
from share_compute.planning.planner import Solution, workload
from share_compute.planning.search.strategies import is_measured, with_nominal_speeds
from share_compute.protocol.membership import Membership, ShardPart, Worker
from share_compute.specification import TrainJob
from share_compute.specification.boundaries import NO_BOUNDARY_COMPRESSION, BoundaryCompression
from share_compute.topology import Topology
from share_compute_actors.group.answering import answered
from share_compute_actors.group.naming import workers_of
from share_compute_actors.messages import MemberStatus
from share_compute_actors.training.member.schemas import STATUS
from share_compute_actors.training.membership.epochs import shared, standing
from share_compute_actors.training.shard_store import ShardStoreFacts, TrainingState
from share_compute_actors.training.step_log import GroupFacts, StepLog
from share_compute_actors.wire import NOTHING, unpack_answer

_ANSWER_S = 5.0
"""Time limit for a member to report its status, and also to switch to its loaded shard, in seconds. A slower member is
killed."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Takeover:
    """Surviving members of an earlier attempt, and the facts about them from the step log."""

    facts: GroupFacts
    actors: Mapping[Worker, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """Starting point of an attempt."""

    facts: ShardStoreFacts
    """Facts that the shard store returned."""
    solution: Solution
    runs: tuple[int, ...]
    """`SummationTree.runs` of the job: number of consecutive microbatch ids in each run."""
    state: TrainingState
    takeover: Takeover | None = None
    """The members that are taken over; None if the attempt starts new members."""
    boundaries: BoundaryCompression = NO_BOUNDARY_COMPRESSION
    """Compression at the boundaries between stages, as the job's first plan fixed it."""


def find_takeover(job_id: str, topology: Topology, step_log: StepLog) -> Takeover | None:
    """Return the surviving members with which the job can continue, and kill all other members.

    Return None and kill all members if the step log has no membership, or if a stage has neither a usable member nor
    a usable backup member.

    Args:
        job_id: id of the job.
        topology: machines that the job may use.
        step_log: step log of the job, claimed by the caller so that no other coordinator commits a step meanwhile.
    """
    left = workers_of(job_id)
    group, committed = step_log.group, step_log.read().committed
    usable: dict[Worker, Any] = {}
    if group is not None:
        known = {machine.id for machine in topology.contributors}
        for actor, status in _statuses(left):
            if status.worker not in known:
                continue
            if fits(group.membership, committed, status) or (
                has_loaded(group.membership, committed, status)
                and _adopts(actor, group.membership.epoch, committed)
            ):
                usable[status.worker] = actor
    found = Takeover(group, usable) if group is not None and is_whole(group.membership, usable) else None
    kept = set(found.actors.values()) if found is not None else set()
    for actor in left:
        if actor not in kept:
            ray.kill(actor)
    return found


def fits(membership: Membership, committed: int, status: MemberStatus) -> bool:
    """Return whether a member computes with its shard, and has applied the last committed step.

    A member that can apply this step without data from other members counts as well.
    """
    part = _part_of(membership, status.worker)
    return part is not None and status.holds == part and status.step <= committed <= status.reaches


def has_loaded(membership: Membership, committed: int, status: MemberStatus) -> bool:
    """Return whether a member has loaded its shard with the weights after the last committed step."""
    part = _part_of(membership, status.worker)
    return part is not None and (status.loaded, status.loaded_step) == (part, committed)


def _part_of(membership: Membership, worker: Worker) -> ShardPart | None:
    return membership.part_of(worker) if worker in membership.workers else None


def is_whole(membership: Membership, usable: Mapping[Worker, object]) -> bool:
    """Return whether each stage has a usable member, or a member with a usable backup member.

    In a stage whose members keep shares of the optimizer's state, each of them must be usable or have such a backup.
    """

    def is_kept(worker: Worker) -> bool:
        return worker in usable or membership.backups.get(worker) in usable

    return all(
        (all if membership.has_shares(place) else any)(map(is_kept, stage))
        for place, stage in enumerate(membership.stages)
    )


def solution_of(
    takeover: Takeover, spec: TrainJob, topology: Topology, profile: ModelProfile, timings: Timings
) -> Solution:
    """Return the solution that the surviving members carry out, with costs for the current machines and links.

    The solution has a simulated step if each stage has a member left and some machine's speed was measured.
    """
    facts, usable = takeover.facts, with_nominal_speeds(topology)
    cost = TrainingCost(profile, usable, complete(usable), workload(spec, facts.plan.microbatches), timings)
    membership = facts.membership
    stages = tuple(
        tuple(worker for worker in stage if worker in takeover.actors) for stage in membership.stages
    )
    owners = tuple(
        shared(stage, shard, cost) if stage and stage != before else who
        for stage, before, shard, who in zip(
            stages, membership.stages, membership.shards, membership.owners, strict=True
        )
    )
    found = standing(
        replace(membership, stages=stages, owners=owners),
        Solution(facts.plan, cost, layout=Layout(()), timeline=None),
    )
    if all(stages) and any(map(is_measured, topology.contributors)):
        return replace(found, timeline=simulate_step(cost, found.layout))
    return found


def state_of(step_log: StepLog, beginning: TrainingState) -> TrainingState:
    """Return the training state after the last committed step.

    Args:
        step_log: step log of the job.
        beginning: training state in the checkpoint, or at the start of the job.
    """
    step = step_log.read().committed
    if step <= beginning.step:
        return beginning
    (last,) = step_log.steps(after=step - 1)
    # The earlier coordinator may have died during the validation after this step, so the validation is repeated.
    validations = {**dict(beginning.validations), **dict(step_log.validations())}
    validations.pop(step, None)
    return TrainingState(
        step, last.loss_scale, tuple((each, validations[each]) for each in sorted(validations))
    )


def _adopts(member: Any, epoch: int, committed: int) -> bool:
    """Have a member switch to the shard that it has loaded; return whether this succeeded."""
    try:
        call = member.adopt.remote(epoch, committed)
        ray.wait([call], timeout=_ANSWER_S)
        unpack_answer(NOTHING, ray.get(call, timeout=0), "a member")
    except (RayError, ShareComputeError, TimeoutError) as failure:
        _log.info("a member of an earlier attempt is not taken over: %s", failure)
        return False
    return True


def _statuses(members: Mapping[Any, Worker]) -> list[tuple[Any, MemberStatus]]:
    calls = {member.status.remote(): member for member in members}
    ready = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_S)[0] if calls else ()
    answers = []
    for ref in ready:
        worker = members[calls[ref]]
        try:
            status = answered(STATUS, ref, worker)
        except (RayError, ShareComputeError) as failure:  # the member is dead, or its answer is invalid
            _log.info("a member of an earlier attempt is not taken over: %s", failure)
            continue
        if status.worker == worker:
            answers.append((calls[ref], status))
    return answers
