"""Machines join and leave while a job runs, shards move, the number of stages changes: the weights stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.chaos.test_recovery import job, train
from tests.ray_nodes import Attempt, processes_on

from share_compute.lifecycle.attempt_events import AttemptEvent, Offer, Planned, Reformed
from share_compute.planning.plan_file import pinned_plan
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point
from share_compute.topology import Contributor, Topology
from share_compute_actors.group.naming import machines_with_members

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

MANY_STEPS = 300
PAUSES = [
    InjectedFailure(FailureKind.stop, Point.cell_starting, worker="c0", step=step, duration_s=0.5)
    for step in range(10, 250, 10)
]
"""Make steps so slow that a machine can be started meanwhile, on any machine that runs this test."""


def reformed(events: list[AttemptEvent]) -> list[Reformed]:
    return [event for event in events if isinstance(event, Reformed)]


def sizes(event: Reformed) -> list[int]:
    return [len(stage.members) for stage in event.plan.stages]


def slow(topology: Topology, count: int) -> Topology:
    """Return the first machines with a low declared speed, so that a plan with more of them pays."""
    return Topology(
        tuple(
            replace(
                machine, devices=(replace(machine.device, flops_per_s={"float32": 1e6}, overhead_s=1e-3),)
            )
            for machine in topology.contributors[:count]
        )
    )


def offer(coordinator: Any, machines: Topology, answers: int | None = None) -> None:
    coordinator.offer.remote(Offer(topology=machines, answers=answers).model_dump_json())


@pytest.mark.parametrize("validate_every", [None, 1], ids=["few pauses", "a pause after each step"])
def test_what_a_stage_of_one_holds_moves_to_others_when_it_leaves(
    attempt: Attempt, topology: Topology, tmp_path: Path, validate_every: int | None
) -> None:
    def leave(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "started":
            coordinator.drain.remote("c1")

    machines = Topology(topology.contributors[:2])
    document = job(2, 1, validate_every=validate_every)
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", document, machines=machines)
    weights, curve, events = train(attempt, tmp_path / "left", document, on_event=leave, machines=machines)
    (change,) = reformed(events)
    assert (change.left, change.lost, change.recomputed, sizes(change)) == (("c1",), (), 0, [1])
    assert curve == calm_curve
    assert weights == calm_weights


def offering(topology: Topology, count: int = 4) -> Callable[[AttemptEvent, Any], None]:
    """Return a receiver of events that offers slow machines to a job, and once more when it proposes a plan."""

    def come(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "started":
            offer(coordinator, slow(topology, count))
        if event.type == "replan-proposed":
            offer(coordinator, slow(topology, count), event.step)

    return come


@pytest.mark.parametrize(
    ("parallelism", "count"),
    [({"stages": 1}, 1), pytest.param({"members_per_stage": 1}, 2, marks=pytest.mark.thorough)],
    ids=["more members", "other cuts"],
)
def test_machines_that_come_are_used(
    attempt: Attempt, topology: Topology, tmp_path: Path, parallelism: dict[str, int], count: int
) -> None:
    document = job(1, 1, steps=MANY_STEPS, validate_every=None, checkpoint_every=None)
    document["parallelism"] = parallelism
    machines = slow(topology, count)
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", document, machines=machines)

    weights, curve, events = train(
        attempt,
        tmp_path / "joined",
        document,
        PAUSES,
        on_event=offering(topology),
        machines=machines,
        drift=1e6,
    )
    changes = reformed(events)
    first = next(change for change in changes if change.joined)
    before = [change for change in changes if change.epoch < first.epoch and "to join: " in change.sentence]
    assert before, "what they are to hold comes while the others train"
    assert set(first.joined) <= set(before[-1].expected)
    assert not any(change.lost for change in changes)
    assert curve == calm_curve
    assert weights == calm_weights


@pytest.mark.thorough
def test_a_loss_just_after_cuts_moved_loses_no_step(
    attempt: Attempt, topology: Topology, tmp_path: Path
) -> None:
    document = job(1, 1, steps=MANY_STEPS, validate_every=None, checkpoint_every=None)
    document["parallelism"] = {"members_per_stage": 1}
    machines = slow(topology, 2)
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", document, machines=machines)

    # The new member dies in the first cell that it computes. Its backup has had no time to fetch anything from it.
    death = InjectedFailure(FailureKind.kill, Point.cell_starting, worker="c2")
    weights, curve, events = train(
        attempt,
        tmp_path / "joined",
        document,
        [*PAUSES, death],
        on_event=offering(topology, 3),
        machines=machines,
        drift=1e6,
    )
    changes = reformed(events)
    joined = next(change for change in changes if change.joined)
    assert sizes(joined) == [1, 1, 1]
    assert [change.lost for change in changes if change.lost] == [("c2",)]
    assert curve == calm_curve
    assert weights == calm_weights


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline


@pytest.mark.thorough  # it computes for a long time
def test_a_machine_that_says_it_is_faster_than_it_is_gets_what_it_can_do(
    attempt: Attempt, topology: Topology, tmp_path: Path
) -> None:
    def measured(machine: Contributor, factor: float) -> Contributor:
        speed = {"float32": factor * 1e10}
        return replace(
            machine, devices=(replace(machine.device, flops_per_s=speed, overhead_s=1e-3 / factor),)
        )

    def shares(event: Planned | Reformed) -> dict[str, int]:
        (stage,) = event.plan.stages
        return {member.contributor_id: len(member.microbatches) for member in stage.members}

    def end(event: AttemptEvent, coordinator: Any) -> None:
        if isinstance(event, Reformed):
            coordinator.cancel.remote()

    # There are so many steps that a move pays on machines of any speed.
    document = job(1, 1, steps=30_000, batch_size=1024, validate_every=None, checkpoint_every=None)
    document["parallelism"] = {"stages": 1, "members_per_stage": 2}
    honest, liar = topology.contributors[:2]
    machines = Topology((measured(honest, 1), measured(liar, 3)))
    events = attempt(document, folder=tmp_path, machines=machines, on_event=end)
    assert events[-1].outcome == "cancelled", events[-1].reason
    believed = next(event for event in events if isinstance(event, Planned))
    assert shares(believed) == {"c0": 2, "c1": 6}
    assert shares(reformed(events)[0])["c1"] < 6


@pytest.mark.thorough
def test_members_end_with_the_plan_that_they_were_started_for(
    attempt: Attempt, topology: Topology, tmp_path: Path
) -> None:
    document = job(1, 1, steps=MANY_STEPS, validate_every=None, checkpoint_every=None)
    document["parallelism"] = {"stages": 1}

    def come(event: AttemptEvent, coordinator: Any) -> None:
        match event.type:
            case "started":
                offer(coordinator, slow(topology, 2))
            case "replan-proposed":
                assert machines_with_members() == {"c0": {"job-test"}}
                offer(coordinator, slow(topology, 2), event.step)
                wait_until(lambda: machines_with_members() == {"c0": {"job-test"}, "c1": {"job-test"}})
                offer(coordinator, slow(topology, 1))  # another job wants it
            case "replan-abandoned":
                wait_until(lambda: machines_with_members() == {"c0": {"job-test"}})
                coordinator.cancel.remote()

    events = attempt(
        document, folder=tmp_path, failures=PAUSES, on_event=come, machines=slow(topology, 1), drift=1e6
    )
    assert (events[-1].type, events[-1].outcome) == ("ended", "cancelled")
    (given_up,) = (event for event in events if event.type == "replan-abandoned")
    assert given_up.reason == "the job cannot have machine-1"
    assert reformed(events) == []


@pytest.mark.thorough
def test_a_machine_with_less_memory_than_it_lends_is_done_without(
    attempt: Attempt, topology: Topology, nodes: list[Any], tmp_path: Path
) -> None:
    wide = 2**18
    document = job(1, 2, steps=6, batch_size=128, microbatches=2, checkpoint_every=None, validate_every=None)
    document["model"] = {
        "layers": [
            {"type": "linear", "options": {"in_features": 64, "out_features": wide}},
            {"type": "relu"},
            {"type": "linear", "options": {"in_features": wide, "out_features": 10}},
        ]
    }
    machines = Topology(topology.contributors[:2])
    calm_weights, calm_curve, _ = train(attempt, tmp_path / "calm", document, machines=machines)

    def take_memory(event: AttemptEvent, _: Any) -> None:
        if event.type == "step" and event.step == 2:
            (member,) = processes_on(nodes[1], "Member")
            member.rlimit(psutil.RLIMIT_AS, (2**20, 2**20))  # no more memory can be allocated

    weights, curve, events = train(
        attempt, tmp_path / "short", document, on_event=take_memory, machines=machines
    )
    assert any("machine-1 ran out of memory" in event.message for event in events if event.type == "note")
    assert [change.lost for change in reformed(events)] == [("c1",)]
    assert curve == calm_curve
    assert weights == calm_weights


@pytest.mark.thorough
def test_a_job_leaves_its_pinned_plan_when_it_loses_a_machine(
    attempt: Attempt, topology: Topology, tmp_path: Path
) -> None:
    def leave(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "started":
            coordinator.drain.remote("c1")

    machines = Topology(topology.contributors[:2])
    document = job(2, 1)
    calm_weights, calm_curve, events = train(attempt, tmp_path / "calm", document, machines=machines)
    (planned,) = (event for event in events if isinstance(event, Planned))
    document["parallelism"] = {"plan": pinned_plan(planned.plan).model_dump(mode="json")}
    weights, curve, kept = train(attempt, tmp_path / "kept", document, machines=machines)
    assert not any(event.type in ("reformed", "replan_proposed") for event in kept)
    assert (weights, curve) == (calm_weights, calm_curve)
    weights, curve, events = train(attempt, tmp_path / "left", document, on_event=leave, machines=machines)
    (change,) = reformed(events)
    assert (change.left, sizes(change), change.plan.strategy) == (("c1",), [1], "auto")
    warnings = [event.message for event in events if event.type == "note" and event.level == "warning"]
    assert "the pinned plan no longer holds: the job continues without machine-1" in warnings
    assert (weights, curve) == (calm_weights, calm_curve)
