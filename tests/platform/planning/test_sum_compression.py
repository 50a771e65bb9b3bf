"""Plans predict the sums of compressed gradients inside a stage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.planning.models import GIB, PROFILE, job, lan, machine, make_plan

from share_compute.planning.cost.memory import gradient_sets
from share_compute.specification import TrainJob

GRADIENT = 4 * PROFILE.parameters
INT8 = 1 + 2 / 256


def summed(name: str, members: int, stages: int = 1) -> TrainJob:
    training = {"compression": {"name": name} if name == "none" else {"name": name, "error_feedback": None}}
    return job(training=training, stages=stages, members_per_stage=members)


@pytest.mark.parametrize(
    ("name", "members", "size"),
    [
        ("none", 2, GRADIENT),
        ("none", 4, 1.5 * GRADIENT),
        ("bf16", 2, GRADIENT / 2),
        ("int8", 2, INT8 * PROFILE.parameters),
        ("int8", 4, 3 * INT8 * PROFILE.parameters),
    ],
)
def test_the_plan_says_what_each_member_receives(name: str, members: int, size: float) -> None:
    topology = lan(*(machine(name) for name in "abcd"[:members]))
    (stage,) = make_plan(summed(name, members), topology, PROFILE).stages
    assert stage.sums is not None
    assert (stage.sum_codec, stage.sums.received_bytes) == (name, math.ceil(size))


def test_one_member_sums_with_nobody() -> None:
    (stage,) = make_plan(summed("int8", 1), lan(machine("a")), PROFILE).stages
    assert (stage.sum_codec, stage.sums) == ("none", None)


@settings(deadline=None, max_examples=20)
@given(st.floats(5, 9), st.sampled_from([2, 4]))
def test_the_step_is_predicted_with_the_compressed_bytes(exponent: float, members: int) -> None:
    topology = lan(*(machine(name) for name in "abcd"[:members]), bytes_per_s=10**exponent)
    plain, compact = (make_plan(summed(name, members), topology, PROFILE) for name in ("none", "int8"))
    assert plain.prediction is not None
    assert compact.prediction is not None
    assert compact.prediction.step_s <= plain.prediction.step_s
    for prediction in (plain.prediction, compact.prediction):
        assert prediction.lower_bound_s <= prediction.formula_s * (1 + 1e-9)
    if exponent < 6:  # computing takes a small part of the step
        saved = plain.stages[0].sums.received_bytes / compact.stages[0].sums.received_bytes  # type: ignore[union-attr]
        assert plain.prediction.step_s / compact.prediction.step_s == pytest.approx(saved, rel=0.3)


def test_the_sums_of_runs_are_held_apart() -> None:
    shares = ((1,) * 8, (8,))
    assert gradient_sets(shares, 1, 0) < gradient_sets(shares, 1, 0, keeps_runs_apart=True) == 8
    assert gradient_sets(shares, 0, 1, keeps_runs_apart=True) == 1
    topology = lan(*(machine(name, memory_bytes=16 * GIB) for name in "abcd"))
    plain, compact = (make_plan(summed(name, 2, stages=2), topology, PROFILE) for name in ("none", "int8"))
    assert [stage.members[0].memory_bytes for stage in plain.stages] == [
        stage.members[0].memory_bytes for stage in compact.stages
    ]  # both stages hold one run at each member
