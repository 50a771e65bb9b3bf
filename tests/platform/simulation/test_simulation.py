"""Fleets, churn, and a job on a simulated clock."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.thoroughly import thoroughly

from share_compute.errors import PlanInfeasible, UserError
from share_compute.files.topology_file import read_topology, write_topology
from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.network.regions import complete
from share_compute.planning.planner import solve
from share_compute.simulation.churn import Churn
from share_compute.simulation.fleet_name import FleetName
from share_compute.simulation.fleets import MOST_MACHINES, make_fleet
from share_compute.simulation.ledger import Ledger
from share_compute.simulation.rules import Change, Downtime, EpochRules, fetching_s
from share_compute.simulation.run import Scenario, simulate
from share_compute.specification import TrainJob, parse_job
from share_compute.specification.workload import TrainingWorkload
from share_compute.topology import HEAD, Topology

HOUR_S = 3600.0
WIDTH = 1024
LAYER = LayerProfile(
    parameters=12 * WIDTH**2,
    forward_flops=QuadraticGrowth(linear=24.0 * WIDTH**2),
    backward_flops=QuadraticGrowth(linear=48.0 * WIDTH**2),
    activation_bytes=QuadraticGrowth(linear=136.0 * WIDTH),
    boundary_numbers=QuadraticGrowth(linear=float(WIDTH)),
)


def model(layers: int = 12) -> ModelProfile:
    return ModelProfile(layers=(LAYER,) * layers)


def job(**parallelism: Any) -> TrainJob:
    return parse_job(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"files": ["a.txt"]},
            "training": {"batch_size": 16, "microbatches": 8, "sequence_length": 128},
            "parallelism": parallelism,
        }
    )


# -- fleets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FleetName)
@pytest.mark.parametrize("machines", [1, 2, 37, 400])
def test_fleets_are_the_same_each_time_and_valid(name: FleetName, machines: int) -> None:
    fleet = make_fleet(name, machines, seed=3)
    assert fleet == make_fleet(name, machines, seed=3)
    assert len({machine.id for machine in fleet.contributors}) == machines
    assert read_topology(write_topology(fleet, "json")) == fleet
    for machine in fleet.contributors:
        assert 5e10 < machine.flops_per_s() < 1e14
        assert 2**30 < machine.memory_bytes < 2**38
        assert 1e9 < machine.memory_bytes_per_s < 1e13
    assert all(0 < link.latency_s < 0.2 and 5e5 < link.bytes_per_s < 1e10 for link in fleet.links)
    network = complete(fleet)
    assert (network.bytes_per_s > 0).all()


def test_machines_are_measured_to_the_head_and_to_four_that_were_there() -> None:
    fleet = make_fleet(FleetName.mixed, 50)
    ids = [machine.id for machine in fleet.contributors]
    for index, own in enumerate(ids):
        targets = [link.target for link in fleet.links if link.source == own]
        assert targets.count(HEAD) == 1
        assert len(set(targets)) == len(targets) == 1 + min(4, index)
        assert set(targets) <= {HEAD, *ids[:index]}


def test_other_seeds_and_kinds_are_other_fleets() -> None:
    assert make_fleet(FleetName.home, 20, seed=1) != make_fleet(FleetName.home, 20, seed=2)
    speed = {
        name: np.mean([machine.flops_per_s() for machine in make_fleet(name, 300).contributors])
        for name in FleetName
    }
    assert speed[FleetName.home] < speed[FleetName.mixed] < speed[FleetName.datacentre]


@pytest.mark.parametrize("machines", [0, -1, MOST_MACHINES + 1])
def test_impossible_fleets_are_refused(machines: int) -> None:
    with pytest.raises(UserError) as refusal:
        make_fleet(FleetName.home, machines)
    assert refusal.value.hint


# -- churn ---------------------------------------------------------------------------------------------------------


def test_churn_keeps_its_means() -> None:
    churn = Churn(mean_up_s=4 * HOUR_S, mean_down_s=HOUR_S)
    trace = list(churn.trace(500, 200 * HOUR_S, seed=1))
    assert trace == list(churn.trace(500, 200 * HOUR_S, seed=1))
    assert trace != list(churn.trace(500, 200 * HOUR_S, seed=2))
    assert trace == sorted(trace)
    # A cycle takes 5 hours: about 40 deaths of each machine, 20,000 in all, so the mean is within 2%.
    deaths = sum(not event.is_up for event in trace)
    assert deaths == pytest.approx(500 * 40, rel=0.02)
    alive_s = 0.0
    last = dict.fromkeys(range(500), (0.0, True))
    for time_s, machine, comes in [*trace, *((200 * HOUR_S, machine, None) for machine in range(500))]:
        since_s, was_up = last[machine]
        assert comes is not was_up
        alive_s += (time_s - since_s) * was_up
        last[machine] = time_s, bool(comes)
    assert alive_s / (500 * 200 * HOUR_S) == pytest.approx(4 / (4 + 1), abs=0.01)


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_impossible_churn_is_refused(times: tuple[float, float]) -> None:
    with pytest.raises(UserError):
        Churn(*times)


def test_more_churn_than_anybody_waits_for_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="times") as refusal:
        Churn(1e-6, 1e-6).trace(1000, 1e9)
    assert refusal.value.hint


def test_a_trace_is_drawn_while_it_is_read() -> None:
    trace = Churn(1.0, 1.0).trace(100, 4e4)  # some four million changes
    assert next(trace).time_s < 1.0


# -- accounting and rules ------------------------------------------------------------------------------------------


def test_the_ledger_counts_every_second_and_step_once() -> None:
    ledger = Ledger(60.0)
    ledger.open(0.0, 2.0, Downtime(noticing_s=1.0, moving_s=2.0), 0.0)
    assert ledger.begun_s == 3.0
    assert ledger.end_of_step_s(8.5) == 9.0
    done = ledger.close(10.0)  # 7 s of work: 3 steps and a half
    assert (ledger.committed, done) == (3, 0.5)
    ledger.lose(done)
    assert ledger.lost == 1
    ledger.open(10.0, math.inf, Downtime(), 0.0)
    assert ledger.close(20.0) == 0.0
    ledger.open(20.0, 4.0, Downtime(), 0.25)
    assert ledger.close(23.0) == 0.0  # three quarters were left
    ledger.open(23.0, 1.0, Downtime(planning_s=50.0), 0.0)
    assert ledger.close(24.0) == 0.0
    hours = ledger.hours
    assert hours.computing_s == 6.0 + 3.0
    assert (hours.redoing_s, hours.noticing_s, hours.planning_s, hours.moving_s) == (1.0, 1.0, 1.0, 2.0)
    assert hours.waiting_s == 10.0
    assert hours.total_s == 24.0
    assert ledger.committed == 4
    assert sum(ledger.curve) == pytest.approx(4)


def stages(*members: tuple[int, ...]) -> Layout:
    return Layout(
        tuple(StageLayout(index, index + 1, each, (1,) * len(each)) for index, each in enumerate(members))
    )


def test_the_dead_shard_comes_from_its_stage_its_backup_or_the_checkpoint() -> None:
    fleet = make_fleet(FleetName.datacentre, 6, seed=1)
    cost = TrainingCost(model(2), fleet, complete(fleet), TrainingWorkload(4, 4, optimizer_tensors=2))
    size = LAYER.parameters * 4 * 3
    moved_s = cost.network.transfer_s(1, 5, size)
    # Another member of the stage has the shard; the backup has it; no member has it.
    assert fetching_s(cost, stages((0, 1), (2,)), stages((5, 1), (2,)), {0}) == moved_s
    assert fetching_s(cost, stages((0,), (1,)), stages((5,), (1,)), {0}) == moved_s
    assert fetching_s(cost, stages((0,), (1,)), stages((5,), (4,)), {0, 1}) == pytest.approx(moved_s)
    # No layers move if all machines stay.
    assert fetching_s(cost, stages((0,), (1,)), stages((0,), (1,)), set()) == 0.0


def test_a_death_costs_noticing_planning_and_moving() -> None:
    fleet = make_fleet(FleetName.datacentre, 6, seed=1)
    cost = TrainingCost(model(2), fleet, complete(fleet), TrainingWorkload(4, 4))
    old, new = stages((0,), (1,)), stages((5,), (1,))
    rules = EpochRules()
    death = rules.pause(cost, Change(old, new, frozenset({0}), is_death=True, is_search=False))
    assert (death.noticing_s, death.planning_s) == (rules.noticing_s, rules.replace_s)
    assert death.moving_s > rules.start_s
    wish = rules.pause(cost, Change(old, new))
    assert (wish.noticing_s, wish.planning_s) == (0.0, rules.search_s)
    assert rules.redone(0.4, old, new) == 0.4
    three = stages((0, 1, 2), (3,))
    assert rules.redone(0.6, three, stages((1, 2), (3,))) == pytest.approx(0.2)
    assert rules.redone(0.6, three, stages((1, 2), (4,))) == 0.6
    assert rules.redone(0.6, three, stages((1,), (2,), (3,))) == rules.redone(0.6, three, None) == 0.6


# -- whole simulations ---------------------------------------------------------------------------------------------


def test_without_failures_a_job_computes_all_the_time() -> None:
    report = simulate(job(), make_fleet(FleetName.home, 8), model(), Scenario(HOUR_S))
    assert report.committed_steps == math.floor(HOUR_S / report.first_step_s)
    assert (report.lost_steps, report.deaths, report.epochs, report.searches) == (0, 0, 1, 1)
    assert report.hours.computing_s == report.hours.total_s == HOUR_S
    assert report.samples_per_s == report.committed_steps * 16 / HOUR_S
    assert report.tokens_per_s == report.samples_per_s * 128
    assert 0 < report.utilisation <= report.member_utilisation <= 1
    assert report.mean_machines == 8


@pytest.mark.parametrize(
    "name", thoroughly(sorted(FleetName, key=lambda name: name == "datacentre"), quick=3)
)
def test_nothing_committed_is_lost(name: FleetName) -> None:
    fleet = make_fleet(name, 20, seed=1)
    scenario = Scenario(12 * HOUR_S, Churn(HOUR_S, HOUR_S / 2), seed=5)
    seen: list[float] = []
    report = simulate(job(), fleet, model(), scenario, progress=seen.append)
    assert report == simulate(job(), fleet, model(), scenario)
    assert report.attempted_steps == report.committed_steps + report.lost_steps
    assert 0 < report.lost_steps <= report.member_deaths <= report.deaths
    assert report.hours.total_s == pytest.approx(12 * HOUR_S)
    assert all(lasted >= 0 for lasted in report.hours.model_dump().values())
    assert report.epochs <= 1 + report.member_deaths + report.searches
    assert report.mean_machines == pytest.approx(20 * 2 / 3, rel=0.1)
    mean = sum(report.curve_samples_per_s) / len(report.curve_samples_per_s)
    assert mean == pytest.approx(report.samples_per_s)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_failures_cost_throughput() -> None:
    fleet = make_fleet(FleetName.campus, 20)
    calm = simulate(job(), fleet, model(), Scenario(24 * HOUR_S))
    rough = simulate(job(), fleet, model(), Scenario(24 * HOUR_S, Churn(HOUR_S / 4, HOUR_S)))
    assert rough.samples_per_s < calm.samples_per_s
    assert rough.hours.noticing_s > 0


def test_a_job_waits_until_machines_that_can_hold_it_are_back() -> None:
    fleet = make_fleet(FleetName.datacentre, 2, seed=1)
    held = 16 * sum(layer.parameters for layer in model(64).layers)
    assert held < sum(machine.memory_bytes for machine in fleet.contributors)
    report = simulate(job(), fleet, model(64), Scenario(24 * HOUR_S, Churn(2 * HOUR_S, HOUR_S)))
    assert report.hours.waiting_s > 0
    assert report.committed_steps > 0
    assert report.hours.total_s == pytest.approx(24 * HOUR_S)


def test_what_no_fleet_holds_is_refused() -> None:
    huge = ModelProfile(layers=(LAYER.model_copy(update={"parameters": 10**12}),) * 2)
    with pytest.raises(PlanInfeasible) as refusal:
        simulate(job(), make_fleet(FleetName.home, 5), huge, Scenario(HOUR_S))
    assert refusal.value.details["missing_bytes"] > 0
    with pytest.raises(UserError):
        simulate(job(), Topology(()), model(), Scenario(HOUR_S))
    with pytest.raises(UserError):
        simulate(job(), make_fleet(FleetName.home, 5), model(), Scenario(0.0))


def test_a_job_may_need_more_machines_than_a_later_search_is_shown() -> None:
    fleet, spec = make_fleet(FleetName.home, 300), job(strategy="dynamic_programming")
    wide = LAYER.model_copy(update={"parameters": 30 * LAYER.parameters})
    profile = ModelProfile(layers=(wide,) * 40)
    solution = solve(spec, fleet, profile, 0, {})
    assert solution.plan.prediction is not None
    assert len(solution.layout.machines) > 16
    report = simulate(spec, fleet, profile, Scenario(HOUR_S))
    assert report.first_step_s == pytest.approx(solution.plan.prediction.step_s)
    assert report.mean_members == len(solution.layout.machines)
    rough = simulate(spec, fleet, profile, Scenario(12 * HOUR_S, Churn(6 * HOUR_S, HOUR_S)))
    assert rough.member_deaths > 0
    assert rough.searches > 1
    assert rough.committed_steps > 0


@pytest.mark.parametrize("machines", thoroughly([100, 300, 1000, MOST_MACHINES], quick=1))
def test_many_machines_over_a_day(machines: int) -> None:
    fleet = make_fleet(FleetName.mixed, machines)
    report = simulate(job(), fleet, model(), Scenario(24 * HOUR_S, Churn(4 * HOUR_S, HOUR_S / 2)))
    assert report.deaths > 4 * machines
    assert report.committed_steps > 0
