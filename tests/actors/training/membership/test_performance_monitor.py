"""Measured beside predicted step times while a job runs, and better plans where they pay; without Ray."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tests.platform.planning.models import PROFILE, job, lan, machine

from share_compute.lifecycle.attempt_events import (
    Assignment,
    AttemptEvent,
    LayersTimed,
    Measured,
    ReplanProposed,
)
from share_compute.planning.cost.timings import LayerTiming, Timings
from share_compute.planning.drift import DriftLimits
from share_compute.planning.planner import Solution, solve
from share_compute.topology import Topology
from share_compute_actors.messages import StepFigures
from share_compute_actors.training.membership.performance_monitor import PerformanceMonitor

LEAST_TIME_S = DriftLimits().least_time_s
TOPOLOGY = lan(machine("a", 50), machine("b", 50), bytes_per_s=1e9)


class Run:
    """One attempt at 1,000 steps, which the test reports; it also replaces the attempt's `Changes`."""

    def __init__(
        self,
        folder: Path,
        known: Timings = MappingProxyType({}),
        topology: Topology = TOPOLOGY,
        **layout: Any,
    ) -> None:
        layout.setdefault("stages", 2)
        spec = job(members_per_stage=1, training={"steps": 1000}, **layout)
        self.solution: Solution = solve(spec, topology, PROFILE, 0, known)
        assert self.solution.timeline is not None
        self.batch_size = spec.training.batch_size
        self.predicted_s = self.solution.timeline.step_s
        self.reported: queue.Queue[AttemptEvent] = queue.Queue()
        self.now_s = 0.0
        self.step = 0
        assignment = Assignment(job_id="job", attempt=1, spec=spec, topology=topology, folder=folder)
        self.usable = topology
        self.proposed: queue.Queue[Solution] = queue.Queue()
        self.pending: Solution | None = None
        self.is_given_up = False
        self.searches: list[Callable[[], None]] = []
        """The searches for a plan that were begun."""
        self.is_slow = False
        """Whether searches do not end, instead of ending before the next step."""
        changes: Any = self
        self.monitor = PerformanceMonitor(
            assignment, self.solution, self.reported.put, changes, clock=lambda: self.now_s, begin=self.search
        )

    def search(self, work: Callable[[], None]) -> Callable[[], bool]:
        self.searches.append(work)
        if not self.is_slow:
            work()
        return lambda: self.is_slow

    def under_way(self) -> Solution | None:
        return self.pending

    def take_given_up(self) -> bool:
        was_given_up, self.is_given_up = self.is_given_up, False
        return was_given_up

    def propose(self, solution: Solution, proposed: ReplanProposed) -> None:
        self.reported.put(proposed)
        self.proposed.put(solution)

    def steps(
        self, count: int, seconds: float, timings: dict[int, dict[int, LayerTiming]] | None = None
    ) -> None:
        for _ in range(count):
            self.step += 1
            self.now_s += seconds
            results = {
                TOPOLOGY.contributors[holders.members[0]].id: StepFigures(
                    targets=1,
                    seconds=seconds,
                    waited_s=seconds / 4,
                    layer_timings=(timings or {}).get(stage),
                )
                for stage, holders in enumerate(self.solution.layout.stages)
            }
            self.monitor.observe(self.step, seconds, results)

    def slow_layers(self, factor: float) -> dict[int, dict[int, LayerTiming]]:
        """Timings as if the machine of the first stage were slower than its probe measured."""
        cost = self.solution.cost
        return {
            place: {
                layer: LayerTiming(
                    *(
                        (factor if place == 0 else 1.0)
                        * float(table[stage.members[0], layer + 1] - table[stage.members[0], layer])
                        for table in (cost.forward_s, cost.backward_s)
                    )
                )
                for layer in range(stage.start, stage.stop)
            }
            for place, stage in enumerate(self.solution.layout.stages)
        }


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    with made.monitor:
        yield made


def test_ten_steps_after_the_first_are_measured_beside_the_prediction(run: Run) -> None:
    run.steps(1, 100.0)  # loads libraries
    run.steps(9, 2.0)
    assert run.reported.empty()
    run.steps(1, 2.0)
    event = run.reported.get_nowait()
    assert isinstance(event, Measured)
    assert (event.step, event.measured_step_s) == (11, 2.0)
    assert event.predicted_step_s == run.predicted_s
    assert [stage.measured_busy_s for stage in event.stages] == [1.5, 1.5]
    for stage in event.stages:
        assert stage.predicted_busy_s is not None
        assert 0 < stage.predicted_busy_s <= run.predicted_s


def test_reports_keep_a_distance(run: Run) -> None:
    run.steps(11, 0.5)
    run.steps(20, 0.5)
    assert run.reported.qsize() == 2


def test_a_slow_machine_leads_to_a_better_plan_once(run: Run) -> None:
    run.steps(4, 2.5 * run.predicted_s, run.slow_layers(3.0))
    run.steps(40, 2.5 * run.predicted_s)
    while not isinstance(event := run.reported.get_nowait(), ReplanProposed):
        pass
    held = {stage.members[0].name: stage.stop - stage.start for stage in event.plan.stages}
    (slow,) = (member.name for member in run.solution.plan.stages[0].members)
    assert held[slow] < 6
    assert event.gain_s > event.move_cost_s
    assert run.proposed.get_nowait().plan == event.plan


def test_times_of_layers_are_reported_as_soon_as_they_are_known(run: Run) -> None:
    timings = run.slow_layers(1.0)
    run.steps(1, 1.0, timings)
    event = run.reported.get_nowait()
    assert isinstance(event, LayersTimed)
    assert event.step == 1
    for place, stage in enumerate(run.solution.plan.stages):
        machine = TOPOLOGY[stage.members[0].contributor_id]
        timed = event.machines[machine.id]
        assert (timed.layers, timed.device) == (timings[place], machine.device)
        assert timed.microbatch_size * 4 == run.batch_size
    run.steps(1, 1.0)
    assert run.reported.empty()


def test_what_earlier_attempts_timed_counts_when_the_job_is_planned_again(tmp_path: Path) -> None:
    known = {"a": dict.fromkeys(range(12), LayerTiming(0.01, 0.02))}
    resumed = Run(tmp_path, known)
    new = {0: {0: LayerTiming(0.03, 0.04)}}
    resumed.steps(1, 1.0, new)
    (first,) = (member.name for member in resumed.solution.plan.stages[0].members)
    timings = resumed.monitor.timings()
    assert timings[first][0] == LayerTiming(0.03, 0.04)
    assert timings["a"][11] == LayerTiming(0.01, 0.02)
    assert known["a"][0] == LayerTiming(0.01, 0.02)  # the plan in use was made from it


def test_steps_as_predicted_lead_to_nothing(run: Run) -> None:
    run.steps(4, run.predicted_s, run.slow_layers(1.0))
    run.steps(200, 1.1 * run.predicted_s)
    assert run.searches == []


def test_a_machine_that_joins_is_planned_with_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, stages=None)
    with run.monitor:
        run.steps(3, run.predicted_s)
        assert run.searches == []
        run.usable = lan(machine("a", 50), machine("b", 50), machine("c", 50), bytes_per_s=1e9)
        run.steps(1, run.predicted_s)
        better = run.proposed.get_nowait()
        assert {member.name for stage in better.plan.stages for member in stage.members} == {"a", "b", "c"}
        run.steps(5, run.predicted_s)
        assert run.proposed.empty()


def test_a_plan_that_is_under_way_is_not_given_up_for_one_that_is_hardly_better(run: Run) -> None:
    run.steps(44, 2.5 * run.predicted_s, run.slow_layers(3.0))
    run.pending = run.proposed.get_nowait()
    for factor in (2.7, 40.0):
        run.is_given_up = True
        assert run.proposed.empty()
        run.steps(1, 2.5 * run.predicted_s, run.slow_layers(factor))
    assert run.proposed.get_nowait().plan.stages != run.pending.plan.stages


def test_a_plan_that_was_given_up_is_proposed_again(run: Run) -> None:
    run.steps(44, 2.5 * run.predicted_s, run.slow_layers(3.0))
    first = run.proposed.get_nowait()
    for _ in range(2):
        run.is_given_up = True
        run.steps(1, 2.5 * run.predicted_s)
        assert run.proposed.get_nowait().plan.stages == first.plan.stages
    run.steps(1, 2.5 * run.predicted_s)
    assert run.proposed.empty()


def test_members_that_are_lost_let_the_job_be_planned_again(run: Run) -> None:
    run.steps(3, run.predicted_s)
    run.monitor.reform(run.solution, are_lost=True)
    run.steps(2, run.predicted_s)
    assert len(run.searches) == 1
    assert run.proposed.empty()  # the plan in use is the best


def test_a_plan_that_was_adopted_is_kept_for_a_while(run: Run) -> None:
    run.steps(44, 2.5 * run.predicted_s, run.slow_layers(3.0))
    adopted = run.proposed.get_nowait()
    run.monitor.reform(adopted)
    searches, begun_s = len(run.searches), run.now_s
    while run.now_s + 3.0 * run.predicted_s - begun_s < LEAST_TIME_S:  # steps drift all the time
        run.steps(1, 3.0 * run.predicted_s)
    assert len(run.searches) == searches
    run.steps(2 * DriftLimits().steps, 3.0 * run.predicted_s)
    assert len(run.searches) > searches


def test_no_search_begins_while_one_runs(run: Run) -> None:
    run.is_slow = True
    run.steps(44, 2.5 * run.predicted_s, run.slow_layers(3.0))
    run.steps(100, 2.5 * run.predicted_s)
    assert len(run.searches) == 1
    run.is_slow = False
    run.steps(44, 2.5 * run.predicted_s)
    assert len(run.searches) > 1


def test_a_gain_that_is_within_the_noise_leads_to_nothing(tmp_path: Path) -> None:
    def propose_at(spread: float) -> bool:
        run = Run(tmp_path)
        with run.monitor:
            median_s = 2.5 * run.predicted_s
            run.steps(1, median_s, run.slow_layers(1.5))
            while not run.searches:
                for factor in (1 - spread, 1.0, 1 + spread):
                    run.steps(1, factor * median_s)
            return not run.proposed.empty()

    assert propose_at(0.05)
    assert not propose_at(0.5)


def test_layers_that_share_cores_are_reported_as_on_cores_of_their_own(tmp_path: Path) -> None:
    """The next plan counts with shared cores itself, and must not count them twice."""
    alone = Run(tmp_path)
    contributors = tuple(replace(one, host="desk", host_threads=1) for one in TOPOLOGY.contributors)
    shared = Run(tmp_path, topology=replace(TOPOLOGY, contributors=contributors))
    assert shared.predicted_s > 1.2 * alone.predicted_s
    assert shared.solution.timeline is not None
    slowdowns = shared.solution.timeline.slowdowns
    assert min(slowdowns.values()) > 1.05

    timed = shared.slow_layers(1.0)
    shared.steps(2, 1.0, timed)
    learned = shared.monitor.timings()
    for place, stage in enumerate(shared.solution.layout.stages):
        slowdown = slowdowns[stage.members[0]]
        for layer, timing in learned[shared.usable.contributors[stage.members[0]].id].items():
            assert timing.forward_s == pytest.approx(timed[place][layer].forward_s / slowdown)
