"""Plans: members and their layers, predicted times, and the shortage if no plan is possible."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.platform.planning.models import GIB, LAYER, PROFILE, job, lan, machine, make_plan

from share_compute.errors import PlanInfeasible, UserError
from share_compute.models.profiles.profile import LayerProfile, ModelProfile
from share_compute.planning.plan import Plan
from share_compute.planning.planner import microbatch_choices, solve
from share_compute.topology import Contributor, Device, Link, Topology

SIMPLE = ["uniform", "memory_weighted", "compute_weighted"]
SEARCHING = ["auto", "dynamic_programming", "recursive"]


def layers(plan: Plan) -> list[int]:
    return [stage.stop - stage.start for stage in plan.stages]


def names(plan: Plan) -> list[list[str]]:
    return [[member.name for member in stage.members] for stage in plan.stages]


class TestSimpleStrategies:
    def test_layers_follow_measured_speed(self) -> None:
        plan = make_plan(
            job(strategy="compute_weighted"),
            lan(machine("slow", 20), machine("fast", 60), machine("middle", 40)),
            PROFILE,
        )
        assert names(plan) == [["slow"], ["fast"], ["middle"]]
        assert layers(plan) == [2, 6, 4]

    def test_the_slowest_are_idle_when_fewer_stages_are_requested(self) -> None:
        topology = lan(machine("a", 1), machine("b", 9), machine("c", 5))
        plan = make_plan(job(strategy="uniform", stages=2), topology, PROFILE)
        assert [idle.name for idle in plan.idle] == ["a"]
        assert "asks for 2 stages of 1 machine" in plan.idle[0].reason

    def test_members_of_a_stage_share_its_microbatches(self) -> None:
        topology = lan(*(machine(name) for name in "abcd"))
        plan = make_plan(job(strategy="uniform", stages=2, members_per_stage=2), topology, PROFILE)
        assert plan.stage_sizes == [2, 2]
        for stage in plan.stages:
            assert [member.microbatches for member in stage.members] == [(0, 1), (2, 3)]

    def test_a_faster_member_gets_more_microbatches(self) -> None:
        topology = lan(machine("fast", 60), machine("slow", 20))
        plan = make_plan(job(strategy="uniform", stages=1, members_per_stage=2), topology, PROFILE)
        assert {member.name: member.microbatches for member in plan.stages[0].members} == {
            "fast": (0, 1, 2),
            "slow": (3,),
        }
        assert plan.shares == ((3, 1),)

    @settings(max_examples=40)
    @given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=9), st.sampled_from(SIMPLE))
    def test_every_layer_is_held_exactly_once(self, speeds: list[float], strategy: str) -> None:
        topology = lan(*(machine(f"m{index}", speed) for index, speed in enumerate(speeds)))
        plan = make_plan(job(strategy=strategy), topology, PROFILE)
        assert [layer for stage in plan.stages for layer in range(stage.start, stage.stop)] == list(range(12))
        assert sum(stage.parameters for stage in plan.stages) == PROFILE.parameters

    def test_a_stage_does_not_mix_kinds_of_devices(self) -> None:
        topology = lan(machine("a", 99, kind="cuda"), machine("b"), machine("c"))
        with pytest.raises(PlanInfeasible, match="mix different kinds of devices"):
            make_plan(job(strategy="uniform", stages=1, members_per_stage=2), topology, PROFILE)

    def test_a_machine_that_no_stage_can_take_because_of_its_kind_is_told_so(self) -> None:
        plan = make_plan(job(), lan(machine("a", 99, kind="cuda"), machine("b", 0.01)), PROFILE)
        assert [idle.name for idle in plan.idle] == ["b"]
        assert "it computes on CPU and the machines of the plan on NVIDIA GPU" in plan.idle[0].reason
        alike = make_plan(job(), lan(machine("a", 99), machine("b", 0.01)), PROFILE)
        assert "it computes on" not in alike.idle[0].reason

    def test_a_dead_link_between_neighbours_is_named(self) -> None:
        topology = Topology((machine("a"), machine("b")), (Link("a", "b", 1e-3, 0.0),))
        with pytest.raises(PlanInfeasible, match="a to b") as caught:
            make_plan(job(strategy="uniform"), topology, PROFILE)
        assert "auto" in str(caught.value.hint)
        assert len(make_plan(job(), topology, PROFILE).stages) == 1


class TestSearchingStrategies:
    @pytest.mark.parametrize("strategy", SEARCHING)
    def test_all_of_the_model_is_placed_within_memory(self, strategy: str) -> None:
        topology = lan(
            machine("a", 60, memory_bytes=2 * GIB), machine("b", 50, memory_bytes=2 * GIB), machine("c")
        )
        plan = make_plan(job(strategy=strategy), topology, PROFILE)
        assert [layer for stage in plan.stages for layer in range(stage.start, stage.stop)] == list(range(12))
        for stage in plan.stages:
            assert sum(len(member.microbatches) for member in stage.members) == plan.microbatches
            for member in stage.members:
                assert member.memory_bytes <= topology[member.contributor_id].memory_bytes

    def test_one_machine_alone_wins_where_links_are_slow(self) -> None:
        topology = lan(machine("fast", 60), machine("slow", 50), bytes_per_s=1e4)
        plan = make_plan(job(), topology, PROFILE)
        assert names(plan) == [["fast"]]
        assert [idle.name for idle in plan.idle] == ["slow"]

    def test_auto_is_at_least_as_fast_as_every_other_strategy(self) -> None:
        rng = random.Random(7)
        for _ in range(12):
            count, rate = rng.randint(2, 5), rng.choice([1e6, 1e7, 1e8])
            topology = lan(*(machine(f"m{n}", rng.uniform(5, 90)) for n in range(count)), bytes_per_s=rate)
            steps = {
                strategy: make_plan(job(strategy=strategy), topology, PROFILE).prediction.step_s  # type: ignore[union-attr]
                for strategy in [*SEARCHING, *SIMPLE]
            }
            assert min(steps.values()) == steps["auto"]

    def test_as_many_stages_and_members_as_requested(self) -> None:
        topology = lan(*(machine(name, 40 + index) for index, name in enumerate("abcd")))
        assert make_plan(job(stages=3, members_per_stage=1), topology, PROFILE).stage_sizes == [1, 1, 1]
        assert make_plan(job(stages=2, members_per_stage=2), topology, PROFILE).stage_sizes == [2, 2]

    def test_a_prediction_stands_between_its_bound_and_the_simulation(self) -> None:
        plan = make_plan(job(), lan(machine("a", 60), machine("b", 30)), PROFILE)
        assert plan.prediction is not None
        assert (
            0
            < plan.prediction.lower_bound_s
            <= plan.prediction.formula_s
            <= plan.prediction.step_s * (1 + 1e-9)
        )
        assert plan.prediction.samples_per_s == pytest.approx(16 / plan.prediction.step_s)
        assert plan.prediction.tokens_per_s == pytest.approx(128 * plan.prediction.samples_per_s)
        assert not plan.prediction.links_assumed

    def test_the_same_input_gives_the_same_plan(self) -> None:
        topology = lan(machine("a", 60), machine("b", 60), machine("c", 60))
        assert make_plan(job(), topology, PROFILE) == make_plan(job(), topology, PROFILE)


class TestMicrobatches:
    def test_the_planner_chooses_a_divisor_of_the_batch(self) -> None:
        plan = make_plan(job(microbatches=None), lan(machine("a", 60), machine("b", 50)), PROFILE)
        assert 16 % plan.microbatches == 0
        fixed = [
            make_plan(job(microbatches=count), lan(machine("a", 60), machine("b", 50)), PROFILE).prediction
            for count in (1, 2, 4, 8, 16)
        ]
        assert plan.prediction is not None
        assert plan.prediction.step_s == min(each.step_s for each in fixed if each is not None)

    def test_a_machine_alone_takes_the_largest_pieces_that_fit(self) -> None:
        assert make_plan(job(microbatches=None), lan(machine("a")), PROFILE).microbatches == 1
        tight = make_plan(job(microbatches=None), lan(machine("a", memory_bytes=3 * GIB)), PROFILE)
        assert tight.microbatches > 1

    @given(st.integers(1, 5000), st.integers(1, 4))
    def test_all_divisors_may_be_chosen(self, batch: int, members: int) -> None:
        spec = job(microbatches=None, training={"batch_size": batch}, members_per_stage=members)
        choices = microbatch_choices(spec)
        least = min(members, batch)
        assert choices == [number for number in range(least, batch + 1) if batch % number == 0]

    def test_no_number_of_many_that_the_job_may_set_is_faster(self) -> None:
        fleet = lan(machine("a", memory_bytes=int(3.2 * GIB)))
        training = {"batch_size": 60}
        open_ = make_plan(job(microbatches=None, training=training), fleet, PROFILE).prediction
        assert open_ is not None
        for number in (12, 15, 20, 30, 60):
            with contextlib.suppress(PlanInfeasible):
                fixed = make_plan(job(microbatches=number, training=training), fleet, PROFILE).prediction
                assert fixed is not None
                assert open_.step_s <= fixed.step_s * (1 + 1e-9)
                assert open_.lower_bound_s <= fixed.lower_bound_s * (1 + 1e-9)


class TestUnmeasured:
    def test_all_machines_count_as_alike_when_none_was_measured(self) -> None:
        plan = make_plan(job(members_per_stage=1), lan(*(machine(name, 0) for name in "abc")), PROFILE)
        assert len(plan.stages) == 3
        assert max(layers(plan)) - min(layers(plan)) <= 3
        assert plan.prediction is None

    @pytest.mark.parametrize("strategy", ["auto", "uniform"])
    def test_some_without_speed_are_left_out_with_a_reason(self, strategy: str) -> None:
        plan = make_plan(job(strategy=strategy), lan(machine("a"), machine("b", 0)), PROFILE)
        assert names(plan) == [["a"]]
        assert plan.idle[0].name == "b"
        assert "not measured" in plan.idle[0].reason

    def test_links_that_nobody_measured_are_said_to_be_assumed(self) -> None:
        plan = make_plan(job(stages=2, members_per_stage=1), Topology((machine("a"), machine("b"))), PROFILE)
        assert plan.prediction is not None
        assert plan.prediction.links_assumed


class TestInfeasible:
    def test_missing_memory_is_said_in_bytes_with_what_would_fit(self) -> None:
        topology = lan(machine("a", memory_bytes=GIB), machine("b", memory_bytes=GIB))
        with pytest.raises(PlanInfeasible, match=r"GiB \(\d+ bytes\) are missing") as caught:
            make_plan(job(), topology, PROFILE)
        details = caught.value.details
        assert details["missing_bytes"] == details["needed_bytes"] - details["lent_bytes"] > 0
        assert details["would_fit"]
        assert caught.value.hint == details["would_fit"][0]

    def test_remedies_that_are_named_do_help(self) -> None:
        size = int(2.2 * GIB)
        with pytest.raises(PlanInfeasible) as caught:
            make_plan(job(microbatches=16), lan(machine("a", memory_bytes=size)), PROFILE)
        remedies = " / ".join(caught.value.details["would_fit"])
        assert "training.optimizer.name: sgd" in remedies
        sgd = {"optimizer": {"name": "sgd"}}
        make_plan(job(microbatches=16, training=sgd), lan(machine("a", memory_bytes=size)), PROFILE)
        assert "one more machine like a" in remedies
        twins = lan(machine("a", memory_bytes=size), machine("b", memory_bytes=size))
        make_plan(job(microbatches=16), twins, PROFILE)

    def test_a_machine_that_is_too_small_for_its_share_is_named(self) -> None:
        topology = lan(machine("large"), machine("small", memory_bytes=GIB))
        with pytest.raises(PlanInfeasible, match="small lacks") as caught:
            make_plan(job(strategy="uniform"), topology, PROFILE)
        assert set(caught.value.details["missing_by_machine"]) == {"small"}
        assert make_plan(job(), topology, PROFILE).stages[0].members[0].name == "large"

    @pytest.mark.parametrize("strategy", ["auto", "uniform"])
    def test_too_few_machines_layers_and_microbatches(self, strategy: str) -> None:
        topology = lan(machine("a"), machine("b"))
        with pytest.raises(PlanInfeasible, match="3 stages of 1 need 3 machines; 2 are ready"):
            make_plan(job(strategy=strategy, stages=3), topology, PROFILE)
        with pytest.raises(PlanInfeasible, match="cannot share 12 layers"):
            make_plan(job(strategy=strategy, stages=13), topology, PROFILE)
        with pytest.raises(PlanInfeasible, match="no machine is ready"):
            make_plan(job(strategy=strategy), Topology(()), PROFILE)

    def test_machines_without_links_that_need_each_other(self) -> None:
        pair = (machine("a", memory_bytes=2 * GIB), machine("b", memory_bytes=2 * GIB))
        topology = Topology(pair, (Link("a", "b", 1e-3, 0.0),))
        with pytest.raises(
            PlanInfeasible, match=r"no usable links.*do not reach each other: a - b"
        ) as caught:
            make_plan(job(microbatches=16), topology, PROFILE)
        assert caught.value.hint

    def test_a_model_without_parameters_is_refused(self) -> None:
        empty = ModelProfile(layers=(LayerProfile(parameters=0),))
        with pytest.raises(UserError, match="no parameters"):
            make_plan(job(), lan(machine("a")), empty)


def test_a_model_of_one_layer_stays_on_one_machine() -> None:
    plan = make_plan(
        job(members_per_stage=1), lan(machine("a", 40), machine("b", 60)), ModelProfile(layers=(LAYER,))
    )
    assert names(plan) == [["b"]]
    assert plan.idle[0].name == "a"


def test_a_model_that_cannot_be_cut_stays_on_one_machine() -> None:
    whole = PROFILE.model_copy(update={"no_cut_reason": "its layers share a state"})
    topology = lan(machine("a", memory_bytes=64 * GIB), machine("b", memory_bytes=64 * GIB))
    assert len(make_plan(job(), topology, whole).stages) == 1
    with pytest.raises(
        PlanInfeasible, match=r"cannot be cut into 2 stages: its layers share a state"
    ) as caught:
        make_plan(job(stages=2), topology, whole)
    assert "leave out the number of stages" in str(caught.value.hint)
    small = lan(machine("a", memory_bytes=3 * GIB), machine("b", memory_bytes=3 * GIB))
    assert len(make_plan(job(), small, PROFILE).stages) == 2
    with pytest.raises(
        PlanInfeasible, match=r"must hold the whole model.*its layers share a state"
    ) as caught:
        make_plan(job(), small, whole)
    assert "parallelism.stages" not in str(caught.value.hint)


def test_a_gpu_counts_alone() -> None:
    both = Contributor(
        "a",
        "a",
        (
            Device("cpu", "cpu", 64 * GIB, {"float32": 1e11}),
            Device("cuda", "gpu", 8 * GIB, {"float32": 1e13}),
        ),
    )
    assert both.memory_bytes == 8 * GIB
    assert both.flops_per_s() == 1e13


def test_a_solution_knows_its_layout_and_its_timeline() -> None:
    solution = solve(job(stages=2, members_per_stage=1), lan(machine("a"), machine("b")), PROFILE, 3, {})
    assert solution.plan.epoch == 3
    assert [stage.start for stage in solution.layout.stages] == [
        stage.start for stage in solution.plan.stages
    ]
    assert solution.timeline is not None
    assert len(solution.timeline.cells) == 2 * 2 * 4
