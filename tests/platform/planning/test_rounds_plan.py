"""Plans of jobs with branches: better places for branches that train already."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from tests.platform.planning.models import GIB, PROFILE, job, lan, machine

from share_compute.planning.branches import place_branches
from share_compute.planning.rounds import Move, better_places, plan_rounds
from share_compute.specification import TrainJob
from share_compute.topology import Contributor, Link, Topology


def local(branches: int, **training: Any) -> TrainJob:
    return job(training={"synchronization": {"kind": "local", "branches": branches}, **training})


def machines(*names: str, gflops: float = 50.0) -> tuple[Contributor, ...]:
    return tuple(machine(name, gflops, memory_bytes=32 * GIB) for name in names)


def search(before: tuple[Contributor, ...], after: tuple[Contributor, ...], left: int = 10) -> Move | None:
    """Return better places for two branches that train on some machines, on others."""
    spec = local(2)
    return better_places(spec, lan(*after), PROFILE, place_branches(spec, lan(*before), PROFILE), left)


def test_a_machine_that_joins_gets_a_branch_and_the_other_branch_stays() -> None:
    move = search(machines("a"), machines("b", "a"))
    assert move is not None
    assert move.round_s < 0.6 * move.current_round_s
    assert move.plan.machines == {"a", "b"}
    assert {place.machines: place.branches for place in move.places} == {("a",): (0,), ("b",): (1,)}


def test_nothing_moves_for_a_slow_machine_or_when_no_round_is_left() -> None:
    assert search(machines("a"), (*machines("a"), *machines("b", gflops=0.5))) is None
    assert search(machines("a"), machines("a", "b"), left=0) is None


def test_nothing_moves_if_the_machines_cannot_hold_the_model() -> None:
    assert search(machines("a"), (machine("a", memory_bytes=1000),)) is None


def test_the_first_branch_decides_which_boundaries_are_compressed() -> None:
    """The second island cuts the model elsewhere, so nothing that it sends is compressed."""
    names = {"a": 50.0, "b": 50.0, "c": 80.0, "d": 20.0}
    links = tuple(
        Link(one, other, *((5e-4, 1e8) if {one, other} in ({"a", "b"}, {"c", "d"}) else (0.05, 1e6)))
        for one, other in permutations(names, 2)
    )
    topology = Topology(
        tuple(machine(name, gflops, memory_bytes=32 * GIB) for name, gflops in names.items()), links
    )
    training = {
        "steps": 100,
        "synchronization": {"kind": "local", "branches": 2, "every": 50},
        "boundary_compression": {"name": "int8"},
    }
    spec = job(training=training, stages=2, members_per_stage=1)
    solution, _, _ = plan_rounds(spec, topology, PROFILE)
    first, second = solution.plan.branches
    assert first.stages[0].stop != second.stages[0].stop
    assert first.stages[0].boundary_codec == "int8"
    assert second.stages[0].boundary_codec == "none"
