"""Rounds of a job on fleets whose machines leave and return, on a simulated clock."""

from __future__ import annotations

from typing import Any

import pytest
from tests.platform.simulation.test_simulation import HOUR_S, model

from share_compute.errors import PlanInfeasible, UserError
from share_compute.planning.branches import contribution_bytes, place_branches, update_bytes
from share_compute.simulation.churn import Churn
from share_compute.simulation.fleet_name import FleetName
from share_compute.simulation.fleets import make_fleet
from share_compute.simulation.report import RoundsReport
from share_compute.simulation.rounds import simulate_rounds
from share_compute.simulation.run import Scenario
from share_compute.specification import TrainJob, parse_job
from share_compute.specification.synchronization import AllReduceSpec

PROFILE = model(2)
OFTEN = Churn(mean_up_s=HOUR_S, mean_down_s=600.0)


def job(**rounds: Any) -> TrainJob:
    return parse_job(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"files": ["a.txt"]},
            "training": {
                "steps": 1_000,
                "batch_size": 4,
                "microbatches": 4,
                "sequence_length": 128,
                "synchronization": {"kind": "local", "branches": 4, "every": 50, **rounds},
                "compression": {"name": "int8"},
            },
        }
    )


def simulated(
    spec: TrainJob, machines: int = 24, churn: Churn | None = OFTEN, *, hours: float = 6.0, seed: int = 0
) -> RoundsReport:
    fleet = make_fleet(FleetName.home, machines, seed=1)
    return simulate_rounds(spec, fleet, PROFILE, Scenario(hours * HOUR_S, churn, seed))


def require_sums(report: RoundsReport) -> None:
    """Check that times and contributions add up."""
    assert report.hours.total_s == pytest.approx(report.simulated_s * report.branches)
    assert min(report.hours.model_dump().values()) >= 0
    due, there = report.rounds * report.branches, report.merged_contributions + report.missing_contributions
    is_apart = report.merged_contributions == report.rounds
    if report.policy in {"local", "parameter_server"} and not is_apart:
        assert there - report.late_contributions + report.ignored_contributions == due
    else:
        assert there == (
            report.rounds if is_apart else due
        )  # a parameter server with staleness merges each push alone
    assert report.deaths >= report.member_deaths == report.replacements + report.stranded


def test_without_losses_each_round_takes_its_predicted_time() -> None:
    spec = job()
    report = simulated(spec, churn=None)
    require_sums(report)
    # The next round of a branch waits for the slowest contribution, but not for the slowest update.
    expected = report.simulated_s / report.first_round_s
    assert expected - 1 <= report.rounds <= 1.01 * expected
    assert report.merged_contributions == 4 * report.rounds
    assert (report.missing_contributions, report.restarts, report.deaths) == (0, 0, 0)
    assert report.samples_per_s == pytest.approx(report.rounds * 4 * 50 * 4 / report.simulated_s)
    sent = contribution_bytes(spec.training, PROFILE)
    assert report.sent_bytes in range(4 * report.rounds * sent, (4 * report.rounds + 4) * sent)
    received = update_bytes(spec.training, PROFILE)
    assert report.received_bytes == 4 * report.rounds * received
    places = place_branches(spec, make_fleet(FleetName.home, 24, seed=1), PROFILE)
    assert report.islands == len(places)
    assert 0 < report.utilisation < 1
    assert report.mean_machines == 24


def test_losses_cost_time_but_no_contribution_if_all_branches_are_the_quorum() -> None:
    calm, disturbed = simulated(job(), churn=None), simulated(job())
    require_sums(disturbed)
    assert disturbed.member_deaths > 0
    assert disturbed.restarts > 0
    assert disturbed.missing_contributions == disturbed.late_contributions == 0
    assert disturbed.rounds < calm.rounds
    assert disturbed.hours.redone_s > 0
    assert disturbed.mean_machines < 24


OTHERS: dict[str, dict[str, Any]] = {
    "elastic": {"kind": "elastic", "rate": 0.2},
    "gossip": {"kind": "gossip", "graph": "ring"},
    "synchronous": {"kind": "parameter_server", "staleness": 0},
}
"""Policies that merge all branches together, as local steps do."""


@pytest.mark.parametrize("policy", OTHERS.values(), ids=OTHERS)
def test_policies_that_merge_all_branches_take_the_time_of_local_steps(policy: dict[str, Any]) -> None:
    """The server sends equal bytes, so only losses make a difference: which weights a branch begins again with."""
    local, other = simulated(job(), churn=None), simulated(job(**policy), churn=None)
    require_sums(other)
    assert other.policy == policy["kind"]
    changed = {"policy": other.policy, "utilisation": pytest.approx(other.utilisation)}
    assert local.model_dump() | changed == other.model_dump()
    disturbed = simulated(job(**policy))
    require_sums(disturbed)
    assert disturbed.restarts > 0
    assert disturbed.missing_contributions == disturbed.late_contributions == 0
    assert disturbed.merged_contributions == 4 * disturbed.rounds


@pytest.mark.parametrize("staleness", [1, 4, "unbounded"])
def test_a_parameter_server_merges_each_push_alone(staleness: Any) -> None:
    spec = job(kind="parameter_server", staleness=staleness)
    report = simulated(spec, hours=12.0)
    require_sums(report)
    assert report.merged_contributions == report.rounds
    assert report.missing_contributions == report.ignored_contributions == 0
    sent = contribution_bytes(spec.training, PROFILE)
    assert report.sent_bytes == sent * report.merged_contributions
    # Each branch receives the updates of all pushes, except those that were merged when it began again.
    each = update_bytes(spec.training, PROFILE) // 4
    assert 0.9 * 4 * report.rounds < report.received_bytes / each <= 4 * report.rounds


def test_the_staleness_bounds_how_far_fast_branches_are_ahead() -> None:
    """Machines differ in speed: the less staleness, the longer fast branches wait."""
    waited, pushed = [], []
    for staleness in (0, 1, 4, "unbounded"):
        report = simulated(job(kind="parameter_server", staleness=staleness), 6, churn=None, hours=12.0)
        waited.append(report.hours.waiting_s / report.hours.total_s)
        pushed.append(report.merged_contributions)
    assert waited == sorted(waited, reverse=True)
    assert waited[-1] == 0.0 < waited[0]
    assert pushed[1:] == sorted(pushed[1:])


def test_late_contributions_of_branches_with_weights_of_their_own_count_for_the_open_round() -> None:
    whole = simulated(job(**OTHERS["elastic"]), 6, hours=24.0)
    quorum = simulated(job(**OTHERS["elastic"], quorum=2, grace_s=1.0), 6, hours=24.0)
    require_sums(quorum)
    assert quorum.rounds > whole.rounds
    assert quorum.missing_contributions > 0
    assert quorum.late_contributions > 0
    assert quorum.ignored_contributions == 0


def test_a_job_without_branches_is_refused() -> None:
    spec = job()
    plain = spec.model_copy(
        update={"training": spec.training.model_copy(update={"synchronization": AllReduceSpec()})}
    )
    with pytest.raises(ValueError, match="no branches"):
        simulated(plain)


def test_equal_arguments_give_equal_reports() -> None:
    assert simulated(job(), hours=2.0) == simulated(job(), hours=2.0)
    assert simulated(job(), hours=2.0) != simulated(job(), hours=2.0, seed=1)


@pytest.mark.parametrize("kind", ["local", "parameter_server"])
def test_a_quorum_merges_without_branches_that_are_late(kind: str) -> None:
    whole = simulated(job(kind=kind), 6, hours=24.0)
    merged = simulated(job(kind=kind, quorum=2, grace_s=1.0), 6, hours=24.0)
    dropped = simulated(job(kind=kind, quorum=2, grace_s=1.0, late="drop"), 6, hours=24.0)
    for report in (merged, dropped):
        require_sums(report)
        assert report.missing_contributions > 0
        assert report.rounds > whole.rounds
    assert merged.late_contributions > 0
    assert dropped.ignored_contributions > 0
    assert dropped.merged_contributions < merged.merged_contributions


def test_an_island_without_machines_waits_until_one_returns() -> None:
    report = simulated(job(branches=2), 2, Churn(HOUR_S, HOUR_S), hours=48.0)
    require_sums(report)
    assert report.stranded > 0
    assert report.hours.idle_s > 0
    assert report.rounds > 0


def test_islands_move_back_to_their_first_machines() -> None:
    report = simulated(job(), hours=24.0)
    assert report.returns > 0


def test_machines_that_cannot_hold_all_branches_are_refused() -> None:
    fleet = make_fleet(FleetName.home, 2, seed=1)
    with pytest.raises(PlanInfeasible):
        simulate_rounds(job(branches=64), fleet, model(48), Scenario(HOUR_S))
    with pytest.raises(UserError):
        simulate_rounds(job(), fleet, PROFILE, Scenario(0.0))


@pytest.mark.parametrize("policy", [{}, {"kind": "parameter_server"}], ids=["local", "parameter_server"])
@pytest.mark.parametrize("servers", [2, "auto"])
def test_merges_on_machines_of_the_job_are_refused(policy: dict[str, Any], servers: Any) -> None:
    with pytest.raises(UserError, match=f"training.synchronization.servers is {servers}") as refused:
        simulated(job(**policy, servers=servers))
    assert "servers to 0" in refused.value.hint


@pytest.mark.parametrize(
    ("machines", "branches", "churn"),
    [(60, 8, OFTEN), pytest.param(10_000, 64, Churn(4 * HOUR_S, 600.0), marks=pytest.mark.thorough)],
)
def test_large_fleets_merge_on_through_many_losses(machines: int, branches: int, churn: Churn) -> None:
    """Spares take the places of lost machines: no branch waits for a machine, and no merge is incomplete."""
    report = simulated(job(branches=branches), machines, churn, hours=8.0)
    require_sums(report)
    assert (report.machines, report.branches) == (machines, branches)
    assert report.replacements > 0
    assert report.stranded == report.hours.idle_s == 0
    assert report.merged_contributions == branches * report.rounds
    assert report.missing_contributions == report.late_contributions == 0
    assert 0.3 < report.rounds * report.first_round_s / report.simulated_s < 1.01
