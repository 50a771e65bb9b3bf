"""Pinned plans: the same layout again, or an error that says what differs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.platform.planning.models import GIB, PROFILE, job, lan, machine, make_plan

from share_compute.errors import PlanInfeasible, UserError
from share_compute.models.profiles.profile import ModelProfile
from share_compute.planning.drift import layout_of, plan_again
from share_compute.planning.dry_run import dry_run
from share_compute.planning.pinned import require_finite
from share_compute.planning.plan import PINNED, BranchPlan, Plan
from share_compute.planning.plan_file import pinned_plan
from share_compute.planning.policies import compare_policies
from share_compute.specification import TrainJob, parse_job
from share_compute.topology import Contributor, Link, Topology

SMALL = PROFILE.model_copy(update={"layers": PROFILE.layers[:3]})
MACHINES = (machine("a", 60), machine("b", 20), machine("c", 40))


def planned(topology: Topology | None = None, **parallelism: Any) -> Plan:
    wanted = parallelism or {"strategy": "uniform", "stages": 2, "members_per_stage": 1}
    return make_plan(job(**wanted), topology or lan(*MACHINES), PROFILE)


def pinning(plan: Plan, training: dict[str, Any] | None = None) -> TrainJob:
    document = pinned_plan(plan).model_dump(mode="json")
    return job(microbatches=None, training=training, plan=document)


@pytest.mark.parametrize("parallelism", [{}, {"stages": 1, "members_per_stage": 3}, {"stages": 3}])
def test_the_same_layout_is_made_again(parallelism: dict[str, Any]) -> None:
    plan = planned(**parallelism)
    spec = pinning(plan)
    again = make_plan(spec, lan(*reversed(MACHINES)), PROFILE)
    assert layout_of(again) == layout_of(plan)
    assert (again.strategy, again.microbatches) == (PINNED, plan.microbatches)
    assert again.carries_out(spec.parallelism.plan)
    assert again.prediction is not None
    assert all(member.standing.startswith("as the pinned plan says") for member in again.stages[0].members)


def test_a_slower_layout_is_kept() -> None:
    plan = planned(strategy="memory_weighted", stages=3, members_per_stage=1)
    best = make_plan(job(), lan(*MACHINES), PROFILE)
    assert layout_of(best) != layout_of(plan)
    assert layout_of(make_plan(pinning(plan), lan(*MACHINES), PROFILE)) == layout_of(plan)


def test_machines_outside_the_plan_are_idle() -> None:
    plan = make_plan(pinning(planned()), lan(*MACHINES, machine("d", 900)), PROFILE)
    assert {machine.name: machine.reason for machine in plan.idle}["d"] == "the pinned plan does not use it"


def test_machines_without_a_speed_can_be_pinned() -> None:
    unmeasured = lan(*(replace(each, devices=(replace(each.device, flops_per_s={}),)) for each in MACHINES))
    plan = planned(unmeasured, strategy="uniform", stages=2, members_per_stage=1)
    again = make_plan(pinning(plan), unmeasured, PROFILE)
    assert layout_of(again) == layout_of(plan)
    assert again.prediction is None


def refused(spec: TrainJob, topology: Topology, profile: ModelProfile = PROFILE) -> PlanInfeasible:
    with pytest.raises(PlanInfeasible, match=r"parallelism\.plan cannot be carried out") as caught:
        make_plan(spec, topology, profile)
    assert "share-compute plan --output" in (caught.value.hint or "")
    return caught.value


def test_a_missing_machine_is_named() -> None:
    plan = planned()
    used = {member.name for stage in plan.stages for member in stage.members}
    rest = [each for each in MACHINES if each.name != min(used)]
    failure = refused(pinning(plan), lan(*rest))
    assert f"{min(used)} is not among the job's machines; ready are" in failure.message
    assert failure.machine == min(used)


def test_a_machine_without_a_speed_is_named() -> None:
    plan = planned(stages=3, members_per_stage=1)
    unknown = replace(MACHINES[0], devices=(replace(MACHINES[0].device, flops_per_s={}),))
    failure = refused(pinning(plan), lan(unknown, *MACHINES[1:]))
    assert "the speed of a was not measured" in failure.message


def test_a_machine_that_is_too_small_is_named_with_its_bytes() -> None:
    plan = planned(stages=3, members_per_stage=1)
    failure = refused(pinning(plan), lan(machine("a", 60, memory_bytes=GIB // 64), *MACHINES[1:]))
    assert "a lends 16.0 MiB and needs " in failure.message
    assert failure.details["missing_by_machine"].keys() == {"a"}


def test_another_model_is_refused() -> None:
    spec = pinning(planned())
    short = PROFILE.model_copy(update={"layers": PROFILE.layers[:5]})
    assert "a model of 12 layers, and this model has 5" in refused(spec, lan(*MACHINES), short).message
    larger = PROFILE.layers[0].model_copy(update={"parameters": 12_000_001})
    other = ModelProfile(layers=(larger, *PROFILE.layers[1:]))
    assert "it is for another model" in refused(spec, lan(*MACHINES), other).message
    named = ModelProfile(layers=PROFILE.layers, layer_types=("Linear",) * 12)
    assert "it is for another model" in refused(spec, lan(*MACHINES), named).message


def test_a_dead_link_between_neighbours_is_named() -> None:
    plan = planned(strategy="uniform", stages=3, members_per_stage=1)
    links = [
        Link(one.id, other.id, 1e-3, 0.0 if {one.name, other.name} == {"a", "b"} else 1e8)
        for place, one in enumerate(MACHINES)
        for other in MACHINES[place + 1 :]
    ]
    failure = refused(pinning(plan), Topology(MACHINES, tuple(links)))
    assert "no usable link joins a to b" in failure.message


def test_a_stage_does_not_mix_kinds_of_devices() -> None:
    plan = planned(stages=1, members_per_stage=3)
    gpu: Contributor = machine("a", 60, kind="cuda")
    assert "mix different kinds of devices" in refused(pinning(plan), lan(gpu, *MACHINES[1:])).message


def test_a_checkpoint_with_other_microbatches_is_refused() -> None:
    plan = planned()
    spec = pinning(plan).with_microbatches(2 * plan.microbatches)
    failure = refused(spec, lan(*MACHINES))
    assert (
        f"it has {plan.microbatches} microbatches, and the job has {2 * plan.microbatches}" in failure.message
    )
    assert failure.details["is_lasting"]


def test_a_step_without_end_is_refused() -> None:
    with pytest.raises(PlanInfeasible, match="no usable link joins the machines that share tied weights"):
        require_finite(math.inf)


def test_a_running_job_is_planned_without_its_pin() -> None:
    spec = pinning(planned(stages=3, members_per_stage=1))
    found = plan_again(spec, lan(*MACHINES[1:]), PROFILE, 1, {}, in_use=3).plan
    assert found.strategy == "auto"
    assert found.machines <= {"b", "c"}
    assert not found.carries_out(spec.parallelism.plan)


def test_planning_on_paper_shows_the_pinned_plan_and_the_others() -> None:
    plan = make_plan(job(strategy="memory_weighted", stages=2), lan(*MACHINES[:2]), SMALL)
    report = dry_run(pinning(plan), lan(*MACHINES), SMALL, compare=True)
    assert report.plan.strategy == PINNED
    assert {row.strategy: row.problem for row in report.alternatives}["auto"] is None
    other = dry_run(pinning(plan), lan(*MACHINES), SMALL, strategy="auto").plan
    assert other.strategy == "auto"


def test_policies_are_compared_without_the_pin() -> None:
    machines = lan(*MACHINES[:2])
    spec = pinning(make_plan(job(stages=2), machines, SMALL))
    assert compare_policies(spec, machines, SMALL) == compare_policies(
        spec.without_pinned_plan(), machines, SMALL
    )


def test_only_plans_of_one_branch_and_of_this_release_are_written() -> None:
    plan = planned()
    branches = plan.model_copy(update={"branches": (BranchPlan(number=0, stages=plan.stages),)})
    with pytest.raises(UserError, match="branches"):
        pinned_plan(branches)
    with pytest.raises(UserError, match="for which model"):
        pinned_plan(plan.model_copy(update={"model_digest": None}))


def test_boundaries_of_a_pinned_plan_are_still_chosen() -> None:
    plan = planned(stages=3, members_per_stage=1)
    topology = lan(*MACHINES, bytes_per_s=1e6)
    spec = pinning(plan, training={"boundary_compression": {"name": "auto"}})
    assert parse_job(spec.model_dump(mode="json")) == spec
    again = make_plan(spec, topology, PROFILE)
    assert again.carries_out(spec.parallelism.plan)
    assert "int8" in {stage.boundary_codec for stage in again.stages}
