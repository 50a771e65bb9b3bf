"""The step protocol in a simulated world: whatever fails, the weights are those of the undisturbed run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from tests.simulated_world.network import Weather
from tests.simulated_world.scenario import Scenario, Upset, UpsetKind, draw, draw_wrong
from tests.simulated_world.world import Outcome, World

from share_compute.protocol.coordinator import Disputed, Diverged
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.points import Point

CHUNK = 500
QUICK = 2_000
SCHEDULES = 12_000


def run(scenario: Scenario) -> Outcome:
    """Run it; raises when anything is lost, doubled or wrong, or when the job does not end."""
    return World(scenario).run()


@pytest.mark.parametrize("first", range(0, QUICK, CHUNK))
def test_drawn_schedules_end_with_the_weights_of_the_undisturbed_run(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run(draw(seed))


@pytest.mark.parametrize("first", range(0, QUICK, CHUNK))
def test_wrong_numbers_never_win_and_only_machines_that_made_them_are_blamed(first: int) -> None:
    blamed = disputed = 0
    for seed in range(first, first + CHUNK):
        scenario = draw_wrong(seed)
        outcome = run(scenario)
        may_dispute = any(failure.kind is FailureKind.deviate for failure in scenario.failures)
        if isinstance(outcome.verdict, Disputed) and may_dispute:
            disputed += 1  # a member was lost before it was clear which of them is wrong
        else:
            assert scenario.diverges_at or outcome.verdict is None
        blamed += bool(outcome.blamed)
    assert blamed > CHUNK / 4
    assert disputed < CHUNK / 50


@pytest.mark.parametrize("first", range(0, QUICK // 2, CHUNK))
def test_members_with_shares_of_the_state_lose_none(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run(replace(draw(seed), shares_optimizer=True))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("first", range(QUICK, SCHEDULES, CHUNK))
def test_many_more_with_shares(first: int) -> None:
    test_members_with_shares_of_the_state_lose_none(first)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("first", range(QUICK, SCHEDULES, CHUNK))
def test_ten_thousand_more(first: int) -> None:
    test_drawn_schedules_end_with_the_weights_of_the_undisturbed_run(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, QUICK, CHUNK))
def test_jobs_survive_one_failure_after_the_other(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run(draw(seed, most=12))


def test_the_same_seed_gives_the_same_run() -> None:
    assert run(draw(7)) == run(draw(7))


def test_drawn_schedules_pass_every_point_and_meet_most_failures() -> None:
    passed: Counter[Point] = Counter()
    failures = unmet = epochs = 0
    for seed in range(400):
        scenario = draw(seed)
        outcome = run(scenario)
        passed.update(outcome.passed)
        failures += len(scenario.failures)
        unmet += len(outcome.unmet)
        epochs += outcome.epochs
    assert set(passed) == set(Point)
    assert unmet < failures / 2
    assert epochs > 2 * 400


# -- one kill at every point ---------------------------------------------------------------------------------------

SINGLES = Scenario(machines=3, stages=3, layers=4, runs=(2, 2), is_tied=True, pauses=(2, 3))
"""Stages of one, each with a backup; the first and the last share a parameter."""
PAIRS = Scenario(machines=4, stages=2, layers=4, runs=(2, 1, 2), is_tied=True, pauses=(2, 3))
"""Stages of two."""
ONE_STAGE = Scenario(machines=3, stages=1, layers=2, runs=(2, 2), pauses=(2, 3))
"""Data parallelism only."""
SCENARIOS = {"singles": SINGLES, "pairs": PAIRS, "one stage": ONE_STAGE}
MEMBER_POINTS = [point for point in Point if point.role == "member"]
COORDINATOR_POINTS = [point for point in Point if point.role == "coordinator"]
OF_BROKEN_REDUCTIONS = (Point.reduce_failed, Point.broken_sending, Point.broken_received)
OF_BACKUPS = (Point.log_sending, Point.log_received)
DISTURBANCES = {
    "none": {},
    "an epoch begins in the middle": {"upsets": (Upset(14.0, UpsetKind.suspect, "c"),)},
    "a reduction breaks": {
        "failures": (InjectedFailure(FailureKind.kill, Point.reduce_starting, "c", step=2),)
    },
}


def kills(scenario: Scenario, point: Point, worker: str | None) -> int:
    """Kill processes at their first, second and fourth passing of a point, among other failures; count the kills."""
    met = 0
    for seed, (occurrence, disturbance) in enumerate(product((1, 2, 4), DISTURBANCES.values())):
        disturbed = replace(scenario, seed=seed, **disturbance)
        failure = InjectedFailure(FailureKind.kill, point, worker, occurrence=occurrence)
        met += failure not in run(replace(disturbed, failures=(*disturbed.failures, failure))).unmet
    return met


def can_be_passed(name: str, point: Point) -> bool:
    if point in OF_BROKEN_REDUCTIONS:
        return name != "singles"
    if point in (Point.tensor_sending, Point.tensor_received):
        return name != "one stage"
    return name == "singles" or point not in OF_BACKUPS


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("point", MEMBER_POINTS, ids=lambda point: point.name)
def test_each_member_may_die_at_each_point(name: str, point: Point) -> None:
    for worker in SCENARIOS[name].workers:
        met = kills(SCENARIOS[name], point, worker)
        if point not in OF_BROKEN_REDUCTIONS and can_be_passed(name, point):
            assert met, f"{worker} never passes it"


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(
    "point", dict.fromkeys((*COORDINATOR_POINTS, *OF_BROKEN_REDUCTIONS)), ids=lambda point: point.name
)
def test_whoever_passes_a_point_may_die(name: str, point: Point) -> None:
    assert bool(kills(SCENARIOS[name], point, None)) is can_be_passed(name, point)


# -- what must be possible -----------------------------------------------------------------------------------------


def test_a_quiet_step_takes_two_messages_a_member_and_no_more() -> None:
    scenario = Scenario(machines=4, stages=2, runs=(2, 2), pauses=(6,), weather=Weather(delay_s=0.001))
    outcome = World(scenario, tick_s=1e9).run()
    passed = outcome.passed
    assert outcome.epochs == 1
    for point in (Point.halt_sending, Point.report_sending, Point.form_sending, Point.formed_sending):
        assert passed[point] == 4
    assert passed[Point.commit_sending] == passed[Point.prepared_sending] == 4 * 6
    assert passed[Point.applied_sending] == 4  # at the pause alone
    assert passed[Point.tensor_sending] == 2 * 4 * 6  # one activation and one gradient a microbatch
    assert passed[Point.cell_done] == 2 * 2 * 4 * 6
    assert not {Point.broken_sending, Point.proceed_sending, Point.log_sending} & passed.keys()


def test_a_death_costs_only_what_was_not_done() -> None:
    """A member dies with one microbatch done, forward and backward: these two cells are done again, and no others."""
    cells = run(ONE_STAGE).passed[Point.cell_done]
    kill = InjectedFailure(FailureKind.kill, Point.cell_done, "a", 2, occurrence=2)
    again = []
    for seed in range(20):
        outcome = run(replace(ONE_STAGE, seed=seed, failures=(kill,)))
        if not outcome.unmet:  # otherwise that member had no cells to compute
            again.append(outcome.passed[Point.cell_done] - cells)
    assert len(again) > 10
    assert set(again) == {2}


@pytest.mark.parametrize("seed", range(20))
def test_the_older_of_two_coordinators_ends(seed: int) -> None:
    scenario = replace(PAIRS, seed=seed, upsets=(Upset(5.0 + seed, UpsetKind.rival, "a"),))
    world = World(scenario)
    world.run()
    assert [seat.machine.phase for seat in world.seats].count("over") == len(world.seats) - 1
    assert world.record.committed == scenario.steps
    assert world.record.epochs == sorted(world.record.epochs)


@pytest.mark.parametrize("seed", range(20))
def test_a_whole_stage_comes_back_from_the_backup(seed: int) -> None:
    scenario = replace(
        SINGLES, seed=seed, failures=(InjectedFailure(FailureKind.kill, Point.apply_done, "b", 2),)
    )
    assert run(scenario).unmet == ()


# -- wrong numbers ---------------------------------------------------------------------------------------------------

CALM = Weather(delay_s=0.001)
MISFITS = (FailureKind.reshape, FailureKind.retype, FailureKind.resize)
TRIPLE = Scenario(machines=3, stages=1, layers=2, runs=(2, 2), weather=CALM)
PAIR = replace(TRIPLE, machines=2)
ROW = Scenario(machines=4, stages=2, layers=4, runs=(2, 2), weather=CALM)


@pytest.mark.parametrize("kind", [*MISFITS, FailureKind.poison])
@pytest.mark.parametrize("scenario", [ROW, SINGLES], ids=["pairs", "singles"])
def test_a_bad_tensor_counts_against_its_sender(scenario: Scenario, kind: FailureKind) -> None:
    failure = InjectedFailure(kind, Point.tensor_sending, "b", step=2)
    outcome = run(replace(scenario, failures=(failure,)))
    assert (outcome.unmet, outcome.blamed, outcome.verdict) == ((), {"b": 1}, None)


def test_a_machine_that_makes_numbers_that_are_not_finite_is_distinguished_from_a_model_that_diverges() -> (
    None
):
    again = [
        InjectedFailure(FailureKind.poison, Point.cell_starting, "b", step=2, occurrence=n)
        for n in (1, 2, 3, 4)
    ]
    assert run(replace(TRIPLE, failures=tuple(again))).blamed == {"b": 1}
    diverged = run(replace(TRIPLE, diverges_at=(2, 1, 0)))
    assert isinstance(diverged.verdict, Diverged)
    assert len(diverged.verdict.by) == 2
    assert diverged.blamed == {}


def test_a_fault_that_does_not_come_again_costs_a_step_and_nobody_is_blamed() -> None:
    failure = InjectedFailure(FailureKind.poison, Point.cell_starting, "b", step=2)
    outcome = run(replace(TRIPLE, failures=(failure,)))
    assert (outcome.unmet, outcome.blamed, outcome.verdict) == ((), {}, None)


def test_one_machine_alone_cannot_be_distinguished_from_the_model() -> None:
    alone = Scenario(machines=1, stages=1, layers=2, runs=(2,), diverges_at=(1, 0, 0))
    verdict = run(alone).verdict
    assert isinstance(verdict, Diverged)
    assert verdict.is_alone


@pytest.mark.parametrize("point", [Point.reduce_done, Point.prepared_sending])
@pytest.mark.parametrize("scenario", [TRIPLE, PAIR], ids=["majority", "two members"])
def test_the_member_whose_gradient_deviates_is_found(scenario: Scenario, point: Point) -> None:
    outcome = run(replace(scenario, failures=(InjectedFailure(FailureKind.deviate, point, "b", step=2),)))
    assert (outcome.unmet, outcome.blamed, outcome.verdict) == ((), {"b": 1}, None)


@pytest.mark.parametrize("tenth", range(150, 200, 5))
def test_a_member_whose_sums_stay_wrong_does_not_win_when_the_other_is_lost(tenth: int) -> None:
    wrong = [
        InjectedFailure(FailureKind.deviate, Point.reduce_done, "b", step=2, occurrence=n)
        for n in range(1, 9)
    ]
    for seed in range(10):
        upset = Upset(tenth / 10, UpsetKind.suspect, "a")
        outcome = run(replace(PAIR, seed=seed, failures=tuple(wrong), upsets=(upset,)))
        assert "a" not in outcome.blamed


def test_two_members_that_disagree_again_with_the_same_answers_end_the_job() -> None:
    lies = [
        InjectedFailure(FailureKind.deviate, Point.prepared_sending, "b", step=2, occurrence=n)
        for n in (1, 2)
    ]
    outcome = run(replace(PAIR, failures=tuple(lies)))
    assert outcome.verdict == Disputed(2, frozenset({"a", "b"}))
    assert outcome.blamed == {}
