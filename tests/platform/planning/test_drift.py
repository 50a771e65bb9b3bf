"""Measurements beside the plan: after a lasting drift, a better plan is proposed only if moving pays."""

from __future__ import annotations

import math

import pytest
from tests.platform.planning.models import PROFILE, job, lan, machine

from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.cost.timings import LayerTiming, Timings
from share_compute.planning.drift import DriftLimits, DriftWatch, moving, plan_again, propose
from share_compute.planning.planner import Solution, solve
from share_compute.specification import TrainJob
from share_compute.topology import Link, Topology

LIMITS = DriftLimits(drift=0.25, steps=3, restart_s=30.0)
SPEC = job(stages=2, members_per_stage=1)
TOPOLOGY = lan(machine("a", 50), machine("b", 50), bytes_per_s=1e9)


def solution(topology: Topology = TOPOLOGY, spec: TrainJob = SPEC) -> Solution:
    return solve(spec, topology, PROFILE, 0, {})


def slowed(current: Solution, name: str, factor: float) -> Timings:
    """Return the timings that a profiler would see if one machine were slower than its probe measured."""
    timings: dict[str, dict[int, LayerTiming]] = {}
    for stage in current.layout.stages:
        (place,) = stage.members
        contributor = current.cost.topology.contributors[place]
        slower = factor if contributor.name == name else 1.0
        timings[contributor.id] = {
            layer: LayerTiming(
                forward_s=slower
                * float(current.cost.forward_s[place, layer + 1] - current.cost.forward_s[place, layer]),
                backward_s=slower
                * float(current.cost.backward_s[place, layer + 1] - current.cost.backward_s[place, layer]),
            )
            for layer in range(stage.start, stage.stop)
        }
    return timings


class TestWatch:
    def test_a_few_slow_steps_are_no_drift(self) -> None:
        watch = DriftWatch(LIMITS)
        assert [watch.observe(1.0, seconds) for seconds in (1.3, 1.3, 1.2, 1.3, 1.3)] == [False] * 5

    @pytest.mark.parametrize("seconds", [1.3, 0.7])
    def test_drift_either_way_is_reported_ever_more_rarely(self, seconds: float) -> None:
        watch = DriftWatch(LIMITS)
        assert [step for step in range(1, 22) if watch.observe(1.0, seconds)] == [3, 9, 21]

    def test_within_the_limit_nothing_is_reported(self) -> None:
        watch = DriftWatch(LIMITS)
        assert not any(watch.observe(1.0, seconds) for seconds in (1.24, 0.76) for _ in range(10))


class TestProposal:
    def test_layers_move_away_from_a_machine_that_is_slower_than_it_said(self) -> None:
        current = solution()
        replan = propose(SPEC, TOPOLOGY, current, slowed(current, "a", 3.0), 10_000, LIMITS)
        assert replan is not None
        assert replan.gain_s > replan.move_cost_s >= LIMITS.restart_s
        held = {
            member.name: stage.stop - stage.start
            for stage in replan.solution.plan.stages
            for member in stage.members
        }
        assert held["a"] < held["b"]
        assert replan.solution.plan.epoch == current.plan.epoch + 1
        assert "instead of" in replan.sentence

    def test_it_does_not_pay_when_few_steps_are_left(self) -> None:
        current = solution()
        timings = slowed(current, "a", 3.0)
        much = propose(SPEC, TOPOLOGY, current, timings, 10_000, LIMITS)
        assert much is not None
        per_step_s = much.gain_s / 10_000
        enough = math.ceil(much.move_cost_s / per_step_s) + 1
        assert propose(SPEC, TOPOLOGY, current, timings, enough, LIMITS) is not None
        assert propose(SPEC, TOPOLOGY, current, timings, enough - 2, LIMITS) is None

    def test_it_does_not_pay_over_a_narrow_link(self) -> None:
        narrow = lan(machine("a", 50), machine("b", 50), bytes_per_s=2e6)
        spec = job(stages=2, members_per_stage=1, backups=False)  # otherwise all wait for copies in transit
        current = solution(narrow, spec)
        timings = slowed(current, "a", 3.0)
        replan = propose(spec, narrow, current, timings, 100_000, LIMITS)
        assert replan is not None
        assert replan.move_cost_s > 5 * LIMITS.restart_s

    def test_nothing_is_proposed_when_the_plan_is_still_the_best(self) -> None:
        current = solution()
        timings = slowed(current, "nobody", 1.0)
        assert propose(SPEC, TOPOLOGY, current, timings, 10**6, LIMITS) is None

    def test_machines_are_the_same_in_whatever_order_they_stand(self) -> None:
        current = solution()
        timings = slowed(current, "a", 3.0)
        known = propose(SPEC, TOPOLOGY, current, timings, 10_000, LIMITS)
        turned = lan(machine("c", 1), machine("b", 50), machine("a", 50), bytes_per_s=1e9)
        replan = propose(SPEC, turned, current, timings, 10_000, LIMITS)
        assert known is not None
        assert replan is not None
        assert replan.current_step_s == pytest.approx(known.current_step_s)
        assert (replan.moved_bytes, replan.gain_s) == (known.moved_bytes, pytest.approx(known.gain_s))

    def test_another_must_be_clearly_better_than_the_plan_that_is_under_way(self) -> None:
        current, free = solution(), job(stages=None, members_per_stage=1)
        begun = propose(SPEC, TOPOLOGY, current, slowed(current, "a", 3.0), 10_000, LIMITS)
        assert begun is not None
        timings = slowed(current, "a", 2.7)
        other = propose(SPEC, TOPOLOGY, current, timings, 10_000, LIMITS)
        assert other is not None
        assert other.solution.plan.stages != begun.solution.plan.stages
        assert propose(SPEC, TOPOLOGY, current, timings, 10_000, LIMITS, begun.solution) is None
        three = lan(*(machine(name, 50) for name in "abc"), bytes_per_s=1e9)
        better = propose(free, three, current, timings, 10_000, LIMITS, begun.solution)
        assert better is not None
        assert {member.name for stage in better.solution.plan.stages for member in stage.members} == set(
            "abc"
        )

    def test_a_plan_that_is_under_way_may_be_proposed_again(self) -> None:
        current = solution()
        timings = slowed(current, "a", 3.0)
        begun = propose(SPEC, TOPOLOGY, current, timings, 10_000, LIMITS)
        assert begun is not None
        again = propose(SPEC, TOPOLOGY, current, timings, 10_000, LIMITS, begun.solution)
        assert again is not None
        assert again.solution.plan.stages == begun.solution.plan.stages

    def test_nothing_is_proposed_when_a_member_is_gone(self) -> None:
        current = solution()
        others = lan(machine("a", 50), machine("c", 50), bytes_per_s=1e9)
        assert propose(SPEC, others, current, slowed(current, "a", 3.0), 10_000, LIMITS) is None


class TestMoving:
    def test_only_layers_that_change_machine_count(self) -> None:
        cost = solution().cost
        before = Layout((StageLayout(0, 6, (0,), (4,)), StageLayout(6, 12, (1,), (4,))))
        after = Layout((StageLayout(0, 4, (0,), (4,)), StageLayout(4, 12, (1,), (4,))))
        seconds, size = moving(cost, before, after)
        assert size == 2 * 12_000_000 * 4 * 3
        assert seconds == pytest.approx(size / 1e9 + 2 * 5e-4)
        assert moving(cost, before, before) == (0.0, 0)


class TestCopies:
    """A re-plan keeps a job on two machines or more, so that a second machine can hold a copy of the state."""

    narrow = lan(machine("a", 50), machine("b", 50), bytes_per_s=1e5)
    asks_for_three = job(stages=3, members_per_stage=1, microbatches=4)

    def again(self, topology: Topology, spec: TrainJob | None = None) -> list[str]:
        found = plan_again(spec or self.asks_for_three, topology, PROFILE, 1, {}, in_use=3)
        return sorted(member.name for stage in found.plan.stages for member in stage.members)

    def test_two_that_are_left_both_go_on_though_one_alone_were_faster(self) -> None:
        without = job(stages=3, members_per_stage=1, microbatches=4, backups=False)
        assert len(self.again(self.narrow, without)) == 1
        assert self.again(self.narrow) == ["a", "b"]

    def test_one_that_is_left_goes_on_alone(self) -> None:
        alone = Topology(self.narrow.contributors[:1])
        assert self.again(alone) == ["a"]

    def test_a_job_that_was_left_on_one_machine_takes_in_another_whatever_it_costs(self) -> None:
        alone = Topology(self.narrow.contributors[:1])
        current = plan_again(self.asks_for_three, alone, PROFILE, 0, {}, in_use=3)
        replan = propose(self.asks_for_three, self.narrow, current, {}, 3, LIMITS)
        assert replan is not None
        assert {member.name for stage in replan.solution.plan.stages for member in stage.members} == {
            "a",
            "b",
        }
        assert replan.sentence.startswith("the job asks for 3 machines and was left on 1; a step would take")

    def test_a_job_is_not_moved_over_a_dead_link(self) -> None:
        alone = Topology(self.narrow.contributors[:1])
        current = plan_again(self.asks_for_three, alone, PROFILE, 0, {}, in_use=3)
        a, b, c = (machine(name, 50) for name in "abc")
        links = (Link.dead(a.id, b.id), Link.dead(a.id, c.id), Link(b.id, c.id, 1e-3, 1e8))
        assert propose(self.asks_for_three, Topology((a, b, c), links), current, {}, 3, LIMITS) is None

    def test_a_job_that_chose_one_machine_stays_there(self) -> None:
        spec = job(microbatches=4)
        alone = Topology(self.narrow.contributors[:1])
        current = plan_again(spec, alone, PROFILE, 0, {}, in_use=1)
        assert propose(spec, self.narrow, current, {}, 10_000, LIMITS) is None
