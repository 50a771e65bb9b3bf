"""Plans count the slices of sequences that the members of a stage compute."""

from __future__ import annotations

import pytest
from tests.platform.planning.models import LAYER, PROFILE, lan, machine, make_plan

from share_compute.errors import PlanInfeasible, UserError
from share_compute.models.profiles.profile import QuadraticGrowth
from share_compute.planning.drift import layout_of
from share_compute.planning.plan_file import pinned_plan
from share_compute.planning.planner import solve
from share_compute.specification import TrainJob, parse_job
from share_compute_actors.training.membership.epochs import shared

LAYERS = PROFILE.model_copy(
    update={"layers": (LAYER.model_copy(update={"cache_numbers": QuadraticGrowth(linear=2048)}),) * 4}
)


def job(sequence: int, length: int = 4096, microbatches: int | None = 2, **parallelism: object) -> TrainJob:
    return parse_job(
        {
            "model": {"config": {"model_type": "llama", "max_position_embeddings": length}},
            "data": {"files": ["a.txt"]},
            "training": {"batch_size": 4, "microbatches": microbatches, "sequence_length": length},
            "parallelism": {"sequence": sequence, **parallelism},
        }
    )


@pytest.mark.parametrize("slices", [2, 4])
def test_a_stage_has_a_machine_for_each_slice(slices: int) -> None:
    fleet = lan(*(machine(name, 50.0 + place) for place, name in enumerate("abcde")))
    plan = make_plan(job(slices, stages=1), fleet, LAYERS)
    (stage,) = plan.stages
    assert plan.microbatches == 2 * slices
    assert [member.microbatches for member in stage.members] == [
        tuple(range(2 * slice_, 2 * slice_ + 2)) for slice_ in range(slices)
    ]
    assert f"1 of {slices} slices of each sequence" in stage.members[0].reason


def activations(slices: int, length: int = 4096) -> float:
    fleet = lan(*(machine(name) for name in "abcd"[:slices]))
    solution = solve(job(slices, length, stages=1), fleet, LAYERS, 0, {})
    return float(solution.cost.activation_bytes[-1])


def test_activations_are_divided() -> None:
    assert activations(2) == pytest.approx(activations(1) / 2)
    assert activations(4) == pytest.approx(activations(1) / 4)


def test_keys_and_values_take_time() -> None:
    fast, slow = (
        make_plan(job(2, stages=1), lan(machine("a"), machine("b"), bytes_per_s=rate), LAYERS)
        for rate in (1e10, 1e7)
    )
    assert fast.prediction is not None
    assert slow.prediction is not None
    # (2 - 1) turns forward and (2 * 2 - 1) backward for each of 2 parts and 4 layers.
    sent = 4 * 2 * 4 * (2048 * 2048 * 2 * 4)
    assert slow.prediction.step_s - fast.prediction.step_s > sent / 1e7 - sent / 1e10


def test_the_planner_chooses_the_number_of_microbatches() -> None:
    plan = make_plan(job(2, microbatches=None), lan(*map(machine, "abcd")), LAYERS)
    assert plan.microbatches in {2, 4, 8}
    assert all(len(stage.members) == 2 for stage in plan.stages)


@pytest.mark.parametrize("stage", [("a", "b"), ("a", "gone")])
def test_members_that_are_left_have_whole_slices(stage: tuple[str, ...]) -> None:
    solution = solve(job(3, length=4095, stages=1, microbatches=4), lan(*map(machine, "abc")), LAYERS, 0, {})
    owners = shared(stage, (0, 4), solution.cost)
    assert owners == (stage[0],) * 8 + (stage[1],) * 4


def test_too_few_machines_are_refused() -> None:
    with pytest.raises(PlanInfeasible, match="need 4 machines; 3 are ready"):
        make_plan(job(4, stages=1), lan(*map(machine, "abc")), LAYERS)


@pytest.mark.parametrize("microbatches", [2, None])
def test_a_pinned_plan_has_the_slices_of_its_machines(microbatches: int | None) -> None:
    fleet = lan(*(machine(name, 50.0 + place) for place, name in enumerate("abcd")))
    plan = make_plan(job(2, stages=2), fleet, LAYERS)
    document = pinned_plan(plan).model_dump(mode="json")
    assert document["microbatches"] == 4
    pinning = job(2, microbatches=microbatches, plan=document)
    again = make_plan(pinning, lan(*map(machine, "dcba")), LAYERS)
    assert layout_of(again) == layout_of(plan)
    assert [member.microbatches for member in again.stages[0].members] == [(0, 1), (2, 3)]
    resumed = pinning.with_microbatches(again.microbatches)  # as a later attempt has it
    assert layout_of(make_plan(resumed, fleet, LAYERS)) == layout_of(plan)


@pytest.mark.parametrize(
    ("slices", "microbatches", "problem"),
    [
        (
            4,
            None,
            "has 2 machines with 2, 2 microbatches in stages.0, and with parallelism.sequence 4 each stage",
        ),
        (2, 4, "parallelism.plan has 2 microbatches, and training.microbatches is 4"),
    ],
)
def test_a_plan_file_of_other_slices_is_refused(slices: int, microbatches: int | None, problem: str) -> None:
    plan = make_plan(job(2, stages=2), lan(*map(machine, "abcd")), LAYERS)
    document = pinned_plan(plan).model_dump(mode="json")
    with pytest.raises(UserError, match=problem):
        job(slices, microbatches=microbatches, plan=document)
    assert not job(
        1, microbatches=None, plan=document
    ).training.microbatches  # whole sequences, with the same layout
