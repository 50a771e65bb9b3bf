"""The choice between lockstep and rounds, for jobs with ``synchronization: {kind: auto}``."""

from __future__ import annotations

from typing import Any

import pytest
from tests.platform.planning.models import GIB, PROFILE, job, machine

from share_compute.errors import PlanInfeasible, UserError
from share_compute.planning.choice import UTILISATION, choose_policy, with_choice
from share_compute.planning.dry_run import dry_run
from share_compute.planning.report import PolicyChoice
from share_compute.specification.synchronization import LocalSpec
from share_compute.topology import Link, Topology

FAST, SLOW = (5e-4, 1e9), (0.05, 1e6)


def machines(delay_s: float, rate: float, gflops: float = 50, memory_bytes: int = 8 * GIB) -> Topology:
    """Return two machines; all links between them and to the server are alike."""
    return Topology(
        (machine("a", gflops, memory_bytes=memory_bytes), machine("b", gflops, memory_bytes=memory_bytes)),
        (
            Link("a", "b", delay_s, rate),
            Link("head", "a", delay_s, rate),
            Link("head", "b", delay_s, rate),
        ),
    )


def auto(training: dict[str, Any] | None = None, **options: Any) -> Any:
    synchronization = {"kind": "auto", "branches": 2, **options}
    return job(training={"steps": 10_000, **(training or {}), "synchronization": synchronization})


def chosen(spec: Any, topology: Topology) -> PolicyChoice:
    choice = choose_policy(spec, topology, PROFILE)
    assert choice is not None
    return choice


def test_machines_with_fast_links_train_in_lockstep_with_the_batches_of_all_branches() -> None:
    spec = auto()
    choice = chosen(spec, machines(*FAST))
    assert choice.every is None
    assert "lockstep" in choice.sentence
    training = with_choice(spec, choice).training
    assert training.synchronization.kind == "allreduce"
    assert training.batch_size == 2 * spec.training.batch_size


def test_slow_links_lead_to_the_shortest_rounds_that_keep_the_branches_computing() -> None:
    spec, topology = auto(every=10_000), machines(*SLOW)
    choice = chosen(spec, topology)
    assert choice.every is not None
    assert 1 < choice.every < 10_000

    def utilisation(every: int) -> float:
        """Return the speed with rounds of ``every`` steps, relative to rounds so long that merges take no time."""
        local = {"kind": "local", "branches": 2, "every": every}
        report = dry_run(job(training={"steps": 10_000, "synchronization": local}), topology, PROFILE)
        assert report.rounds is not None
        (step_s,) = {island.step_s for island in report.rounds.islands}
        assert step_s is not None
        assert report.rounds.round_s is not None
        return every * step_s / report.rounds.round_s

    assert utilisation(choice.every) >= UTILISATION > utilisation(choice.every - 1)


@pytest.mark.parametrize(
    ("options", "training", "every"),
    [
        ({"every": 600}, {}, 600),
        ({"every": 3}, {}, None),  # such short rounds are slower than lockstep
        ({"every": 9_000, "shortest": 8_000}, {}, 8_000),
        ({"every": 5_000}, {"validate_every": 10_000, "checkpoint_every": 5_000}, 1_000),
    ],
)
def test_limits_and_intervals_hold(
    options: dict[str, Any], training: dict[str, Any], every: int | None
) -> None:
    free = chosen(auto(every=10_000), machines(*SLOW)).every
    assert free is not None
    assert 625 < free <= 1_000, "divisors of 5,000 on both sides"
    assert chosen(auto(training, **options), machines(*SLOW)).every == every


def test_a_dry_run_plans_what_was_chosen_and_says_why() -> None:
    report = dry_run(auto(every=10_000), machines(*SLOW), PROFILE)
    assert report.choice is not None
    assert report.rounds is not None
    assert report.rounds.every == report.choice.every
    assert f"rounds of {report.choice.every:,} steps. Rounds would train " in report.choice.sentence

    report = dry_run(auto(), machines(*FAST), PROFILE)
    assert report.choice is not None
    assert (report.choice.every, report.rounds) == (None, None)
    assert dry_run(job(), machines(*FAST), PROFILE).choice is None


def test_each_island_has_exchanges_of_its_own() -> None:
    """The machine with the slow link computes faster, so its exchange does not show in the slowest island's round."""
    far = Topology(
        (machine("a", 40), machine("b", 50)),
        (Link("a", "b", *SLOW), Link("head", "a", 1e-4, 1e9), Link("head", "b", *SLOW)),
    )
    spec = auto(every=10_000)
    choice = chosen(spec, far)
    assert choice.every is not None
    report = dry_run(with_choice(spec, choice), far, PROFILE)
    assert report.rounds is not None
    assert choice.rounds_samples_per_s == pytest.approx(report.rounds.samples_per_s, rel=1e-6)
    step_s = max(island.step_s or 0 for island in report.rounds.islands)
    assert report.rounds.round_s is not None
    assert choice.every * step_s >= UTILISATION * report.rounds.round_s


def test_without_measured_speeds_the_job_trains_in_lockstep() -> None:
    choice = chosen(auto(), machines(*SLOW, gflops=0))
    assert (choice.every, choice.rounds_samples_per_s, choice.lockstep_samples_per_s) == (None, None, None)
    assert "no measured speed" in choice.sentence


def test_machines_that_cannot_train_the_model_are_an_error() -> None:
    with pytest.raises(PlanInfeasible):
        choose_policy(auto(), machines(*FAST, memory_bytes=2**20), PROFILE)


@pytest.mark.parametrize(("links", "name"), [(FAST, "lockstep"), (SLOW, "rounds")])
def test_the_comparison_marks_the_chosen_policy_and_has_the_samples_of_the_job(
    links: tuple[float, float], name: str
) -> None:
    spec = auto(every=10_000)
    rows = dry_run(spec, machines(*links), PROFILE, compare=True).policies
    assert [row.policy for row in rows if row.is_own] == [name]
    assert {row.branches for row in rows if row.policy != "lockstep"} == {2}


@pytest.mark.parametrize(("steps", "every"), [(50, 50), (10_000, 100)])
def test_rounds_are_no_longer_than_the_job_and_its_intervals(steps: int, every: int) -> None:
    policy = auto({"steps": steps}).training.synchronization
    assert policy.length(10**6, steps, []) == every
    assert policy.length(1, steps, [50]) == 1
    assert policy.length(26, steps, [50]) == 50
    assert policy.length(10**6, steps, [50]) == 50


def test_rounds_keep_all_options_of_the_job() -> None:
    spec = auto(preset="sparse_loco", every=60, quorum=1, grace_s=5, servers=2)
    policy = with_choice(spec, PolicyChoice(every=20)).training.synchronization
    assert policy == LocalSpec(branches=2, every=20, inner_state="keep", quorum=1, grace_s=5, servers=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shortest": 101}, "shortest 101 is more than every 100"),
        ({"overlap": 4, "shortest": 4}, "overlap 4 must be less than shortest 4"),
        ({"shortest": 0}, "at least 1"),
        ({"shortest": 20_000, "every": 30_000}, "shortest 20000 is more than the 10000 steps"),
    ],
)
def test_limits_that_cannot_hold_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        auto(**options)


def test_intervals_that_no_round_divides_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"no number of steps from synchronization\.shortest 11 to 12 divides 50"
    ):
        auto({"validate_every": 50}, shortest=11, every=12)
