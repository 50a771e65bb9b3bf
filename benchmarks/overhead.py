"""Compare the step time with the step protocol to that of the same schedule without it.

Both sides run in the same members, with the same weights, channel, group and samples, and take turns. Without the
protocol a member executes its cells in order: there is no prepare, no step log, no commit, and no decision about the
next action. After each turn the weights are restored, so that the other side takes the same steps; the losses must be
bitwise equal. The members' messages make one hop more here than in a job, so the protocol is no faster here than there.

A second figure is the cost of backups on another machine: two jobs of two stages of one member take turns with the
same steps, one with backups and one without.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from _harness import Ours, arguments, cluster, job, print_figure

from share_compute.protocol.cells import delivery, holders, needed, remaining
from share_compute.protocol.membership import Membership
from share_compute.protocol.tree import SummationTree
from share_compute_actors.training.member.samples import Rows
from share_compute_actors.transport.envelope import WireLabel

GOAL = 0.03
"""Maximum overhead of the protocol, as a fraction of the step time."""
BACKUP_GOAL = 0.06
"""Maximum overhead of backups, as a fraction of the step time."""
LAYOUTS = ((2, 1), (1, 2))
"""Layouts as (number of stages, members of each)."""
_SETTLING_STEPS = 6
"""Number of steps that are not measured: the first one is warm-up, the next ones run the profiler."""


class Block(NamedTuple):
    """Times and losses of the steps that one member ran without the protocol."""

    began_s: float
    ended_s: float
    """End; as ``began_s`` by the clock that all processes of a machine share."""
    losses: list[float]
    """Losses in the order of the steps; only the last stage has them."""


def straight(
    member: Any, first: int, count: int, membership: Membership, tree: SummationTree, shard_store: Any
) -> Block:
    """Run steps without the protocol in one member, on its compute thread."""
    engine, me = member._engine, member._setup.worker  # noqa: SLF001 - no public API bypasses the protocol
    walked: Block = engine.order(partial(_walk, engine, me, first, count, membership, tree, shard_store))
    return walked


def _walk(
    engine: Any,
    me: str,
    first: int,
    count: int,
    membership: Membership,
    tree: SummationTree,
    shard_store: Any,
) -> Block:
    runner, channel, stage = engine.runner, engine.channel, membership.stage_of(me)
    inputs = Rows(shard_store, "inputs") if runner.stage.shard.is_first else None
    targets = Rows(shard_store, "targets") if runner.stage.shard.is_last else None
    rows = [part for part in (inputs, targets) if part is not None]
    own = [microbatch for microbatch, owner in enumerate(membership.owners[stage]) if owner == me]

    def wanted(step: int, action: Any) -> Any:
        """Return the input of a cell: samples, or a tensor that a neighbour sends."""
        label = needed(membership, step, stage, action)
        if label is not None:
            return channel.receive(_unprocessed(label), "a neighbour", 60.0)
        part = inputs if action.kind == "F" else targets
        assert part is not None
        return part.take(step, action.microbatch)

    for part in rows:  # the protocol prefetched them in the step before
        part.expect(first, own)
        part.take(first, own[0])
    losses = []
    began_s = time.perf_counter()
    for step in range(first, first + count):
        for part in rows:
            part.expect(step, own)
            part.expect(step + 1, own)
        actions = remaining(membership, step, me)
        held = [tree.cover(ids) for ids in holders(membership, step, stage)]
        for action in actions:
            entering = wanted(step, action)
            if action.kind == "F":
                runner.forward(step, action.microbatch, entering)
            else:
                is_last = action is actions[-1]
                runner.backward(action.microbatch, entering, holders=held if is_last else None)
            sent = delivery(membership, step, stage, action)
            if sent is not None:
                label, target = sent
                channel.send(target, _unprocessed(label), runner.kept(label.cargo, label.microbatch))
        runner.reduce(held)
        known = runner.losses()
        if known:
            losses.append(math.fsum(known.values()) / (runner.targets_per_microbatch * len(known)))
        runner.apply(step, 1.0)
        for part in rows:
            part.forget(step)
        channel.forget_evaluations()
    return Block(began_s, time.perf_counter(), losses)


def _unprocessed(label: Any) -> WireLabel:
    """Return a label with which the channel keeps a tensor for its receiver and does not pass it to the protocol."""
    return WireLabel("test", *label)


def keep(member: Any) -> None:
    """Save the current state of one member."""
    runner = member._engine.runner  # noqa: SLF001
    tensors = list(runner.parameters.values())
    for state in runner.optimizer.state.values():
        tensors += state.values()
    member.kept = [(tensor, tensor.detach().clone()) for tensor in tensors]


def put_back(member: Any) -> None:
    """Restore the state that `keep` saved."""
    for tensor, before in member.kept:
        tensor.data.copy_(before)


class Sides:
    """Members that take the same steps with and without the protocol.

    Args:
        ours: runner of the members.
    """

    def __init__(self, ours: Ours) -> None:
        self._ours = ours
        self._tree = SummationTree(max(ours.plan.shares, key=len))
        self.losses: dict[str, list[float]] = {"ours": [], "straight": []}

    def turn(self, first: int, count: int, *, begins_straight: bool) -> tuple[float, float]:
        """Take the same steps with and without the protocol; return the seconds of both, in this order."""
        self._all(keep)
        if begins_straight:
            straight_s = self._straight(first, count)
            self._all(put_back)
            ours_s = self._protocol(first, count)
        else:
            ours_s = self._protocol(first, count)
            self._all(put_back)
            straight_s = self._straight(first, count)
        return ours_s, straight_s

    def _protocol(self, first: int, count: int) -> float:
        seconds = self._ours.block(first, count)
        self.losses["ours"] += self._ours.losses[-count:]
        return seconds

    def _straight(self, first: int, count: int) -> float:
        membership = self._ours.led.conductor.membership
        blocks = self._all(straight, first, count, membership, self._tree, self._ours.shard_store)
        self.losses["straight"] += blocks[membership.stages[-1][0]].losses
        began_s = min(block.began_s for block in blocks.values())
        return float(max(block.ended_s for block in blocks.values()) - began_s)

    def _all(self, work: Callable[..., Any], *given: Any) -> dict[str, Any]:
        """Call a function in all members in parallel; return the results by member."""
        import ray

        group = self._ours.led.group
        calls = {
            worker: group.handle(worker).__ray_call__.remote(work, *given) for worker in sorted(group.workers)
        }
        return {worker: ray.get(call) for worker, call in calls.items()}


def measure(nodes: list[str], stages: int, members: int, turns: int, steps: int) -> None:
    """Measure one layout and print its figure."""
    with tempfile.TemporaryDirectory() as name:
        spec = job(
            Path(name),
            steps=10_000,
            strategy="uniform",
            stages=stages,
            members_per_stage=members,
            backups=False,
        )
        ours = Ours(spec, Path(name), nodes, [1.0] * len(nodes))
        try:
            ours.block(1, _SETTLING_STEPS)
            sides = Sides(ours)
            seconds = [
                sides.turn(_SETTLING_STEPS + 1 + number * steps, steps, begins_straight=number % 2 == 0)
                for number in range(turns)
            ]
        finally:
            ours.close()
    if sides.losses["ours"] != sides.losses["straight"]:
        raise RuntimeError(f"the sides did not train the same: {sides.losses}")
    shares = [own / other - 1 for own, other in seconds]
    overhead = statistics.median(shares)
    print_figure(
        "protocol_overhead",
        ours=overhead,
        peer=GOAL,
        peer_name="goal, against the same schedule without the protocol",
        ratio=(1 + GOAL) / (1 + overhead),
        unit="share of the step time",
        layout=f"{stages} x {members}",
        step_ms=round(1000 * statistics.median(own for own, _ in seconds) / steps, 1),
        straight_step_ms=round(1000 * statistics.median(other for _, other in seconds) / steps, 1),
        shares=sorted(round(share, 3) for share in shares),
        turns=turns,
        steps_per_turn=steps,
    )


def measure_backups(nodes: list[str], turns: int, steps: int) -> None:
    """Measure the cost of backups and print the figure."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as groups:
        sides: dict[bool, Ours] = {}
        for has_backups in (False, True):
            folder = Path(name) / str(has_backups)
            folder.mkdir()
            spec = job(
                folder, steps=10_000, strategy="uniform", stages=2, members_per_stage=1, backups=has_backups
            )
            sides[has_backups] = Ours(spec, folder, nodes, [1.0] * len(nodes))
            groups.callback(sides[has_backups].close)
            # In these steps the backups are fetched, and their gradients are applied once.
            sides[has_backups].block(1, 2 * _SETTLING_STEPS)
        seconds: list[tuple[float, float]] = []
        for number in range(turns):
            first = 2 * _SETTLING_STEPS + 1 + number * steps
            taken = {
                has_backups: sides[has_backups].block(first, steps)
                for has_backups in ((False, True) if number % 2 == 0 else (True, False))
            }
            seconds.append((taken[True], taken[False]))
        losses = [side.losses for side in sides.values()]
        gradient_bytes = 4 * sides[True].parameters
    if losses[0] != losses[1]:
        raise RuntimeError(f"the sides did not train the same: {losses}")
    overhead = statistics.median(own / other - 1 for own, other in seconds)
    print_figure(
        "backup_overhead",
        ours=overhead,
        peer=BACKUP_GOAL,
        peer_name="goal, against the same job without copies",
        ratio=(1 + BACKUP_GOAL) / (1 + overhead),
        unit="share of the step time",
        layout="2 x 1",
        step_ms=round(1000 * statistics.median(own for own, _ in seconds) / steps, 1),
        without_step_ms=round(1000 * statistics.median(other for _, other in seconds) / steps, 1),
        sent_mib_per_step=round(gradient_bytes / 2**20, 1),
        shares=sorted(round(own / other - 1, 3) for own, other in seconds),
        turns=turns,
        steps_per_turn=steps,
    )


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    with cluster(2) as nodes:
        for stages, members in LAYOUTS:
            measure(nodes, stages, members, options.blocks, options.steps)
        measure_backups(nodes, options.blocks, options.steps)


if __name__ == "__main__":
    main()
