"""Sums the gradient of one stage over its members."""

from __future__ import annotations

from collections.abc import Callable

from share_compute.errors import ContributorLost
from share_compute.protocol.cells import holders
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import Reduce, Reduced, ReduceFailed
from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.points import Point
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.transport.collective.backend import EpochGroup


def held_by(membership: Membership, worker: Worker, step: int, tree: SummationTree) -> list[tuple[Node, ...]]:
    """Return the sums that each member of a worker's stage holds at the end of a step, by rank."""
    return [tree.cover(ids) for ids in holders(membership, step, membership.stage_of(worker))]


def reduce(
    effect: Reduce,
    machine: MemberMachine,
    tree: SummationTree,
    runner: Runner,
    group: EpochGroup | None,
    passes: Callable[[Point], object],
) -> Reduced | ReduceFailed:
    """Sum the gradients of a stage, or copy the sum from the member that has it.

    Args:
        effect: the reduction to run.
        machine: the member's protocol machine; without a membership if the member was halted meanwhile.
        tree: the order in which gradients are added.
        runner: runner with this member's gradients.
        group: process group of the stage; None if the stage has no other members.
        passes: called at each protocol point of the reduction.
    """
    membership, worker = machine.membership, machine.worker
    if membership is None and group is not None:
        has_begun = runner.is_reducing
        if has_begun:
            runner.spoil()
        return ReduceFailed(is_spoilt=has_begun)
    place = membership.stage_of(worker) if membership is not None else 0
    has_it = membership is not None and effect.source is not None and worker in membership.reduced[place]
    try:
        if membership is None or group is None:
            runner.reduce([])
        elif effect.source is None:
            runner.reduce(held_by(membership, worker, effect.step, tree))
        else:
            runner.copy(membership.stages[place].index(effect.source), has_it=has_it)
    except ContributorLost:
        if not has_it:
            runner.spoil()
        passes(Point.reduce_failed)
        return ReduceFailed()
    passes(Point.reduce_done)
    return Reduced()
