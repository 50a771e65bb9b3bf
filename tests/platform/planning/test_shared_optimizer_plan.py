"""Plans count the shares of the optimizer's state that members of a stage keep."""

from __future__ import annotations

import random

import pytest
from tests.platform.planning.models import GIB, PROFILE, job, lan, machine, make_plan

from share_compute.errors import PlanInfeasible
from share_compute.planning.plan import Plan
from share_compute.specification import TrainJob

STATE = 8 * PROFILE.parameters
"""Bytes of the state of AdamW for the whole model."""


def stage_of(members: int, optimizer: str, **training: object) -> TrainJob:
    return job(training=training, stages=1, members_per_stage=members, optimizer=optimizer)


def needs(plan: Plan) -> list[int]:
    return [member.memory_bytes for stage in plan.stages for member in stage.members]


@pytest.mark.parametrize("members", [1, 2, 4])
def test_each_member_keeps_its_share(members: int) -> None:
    topology = lan(*(machine(name) for name in "abcd"[:members]))
    whole, shared = (
        make_plan(stage_of(members, optimizer), topology, PROFILE) for optimizer in ("replicated", "sharded")
    )
    saved = STATE * (1 - 1 / members)
    assert needs(whole)[0] - needs(shared)[0] == pytest.approx(saved, rel=1e-6)
    sentence = "of the optimizer's"
    assert (sentence in shared.stages[0].members[0].reason) is (members > 1)
    assert sentence not in whole.stages[0].members[0].reason


def test_sums_go_directly_whatever_would_be_fastest() -> None:
    plan = make_plan(stage_of(3, "sharded"), lan(*(machine(name) for name in "abc")), PROFILE)
    assert plan.stages[0].sums is not None
    assert plan.stages[0].sums.algorithm == "sharded"


def test_a_model_that_did_not_fit_fits_with_shares() -> None:
    (need,) = set(needs(make_plan(stage_of(4, "replicated"), lan(*map(machine, "abcd")), PROFILE)))
    memory = int(need / 0.9 - 0.5 * STATE)
    topology = lan(*(machine(name, memory_bytes=memory) for name in "abcd"))
    with pytest.raises(PlanInfeasible) as caught:
        make_plan(stage_of(4, "replicated"), topology, PROFILE)
    assert any("parallelism.optimizer: sharded" in one for one in caught.value.details["would_fit"])
    make_plan(stage_of(4, "sharded"), topology, PROFILE)


@pytest.mark.parametrize("strategy", ["auto", "recursive"])
def test_searches_stay_within_memory_and_above_their_bound(strategy: str) -> None:
    drawn = random.Random(3)
    found = 0
    for _ in range(3):
        topology = lan(
            *(machine(name, memory_bytes=int(drawn.uniform(1.0, 2.5) * GIB)) for name in "abcde"),
            bytes_per_s=10 ** drawn.uniform(7, 9),
        )
        try:
            plan = make_plan(job(strategy=strategy, optimizer="sharded"), topology, PROFILE)
        except PlanInfeasible:
            continue
        found += 1
        for stage in plan.stages:
            for member in stage.members:
                assert member.memory_bytes <= topology[member.contributor_id].memory_bytes
        assert plan.prediction is not None
        assert plan.prediction.lower_bound_s <= plan.prediction.formula_s * (1 + 1e-9)
    assert found


def test_weights_are_gathered_after_the_update() -> None:
    """Half of the traffic cannot be hidden, and the update of each member is shorter."""
    topology = lan(*map(machine, "ab"), bytes_per_s=1e8)
    whole, shared = (
        make_plan(stage_of(2, optimizer, collective="sharded"), topology, PROFILE)
        for optimizer in ("replicated", "sharded")
    )
    assert whole.prediction is not None
    assert shared.prediction is not None
    assert whole.stages[0].sums == shared.stages[0].sums
    assert shared.prediction.step_s != whole.prediction.step_s
    assert shared.prediction.step_s == pytest.approx(shared.prediction.formula_s, rel=0.2)
