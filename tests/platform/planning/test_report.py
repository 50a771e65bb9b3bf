"""Dry runs: the plan with its timeline, other strategies, islands and serving."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from tests.platform.planning.models import GIB, LAYER, PROFILE, job, lan, machine, make_plan

from share_compute.errors import PlanInfeasible, UserError
from share_compute.models.profiles.profile import QuadraticGrowth
from share_compute.planning.dry_run import dry_run
from share_compute.planning.plan import Prediction
from share_compute.planning.report import PlanReport
from share_compute.planning.search.partitioning import strategy_names
from share_compute.planning.serving.plan import plan_serving
from share_compute.specification.workload import ServingWorkload
from share_compute.topology import Link, Topology

TOPOLOGY = lan(machine("a", 60), machine("b", 40), machine("c", 10))
_CACHED = LAYER.model_copy(update={"cache_numbers": QuadraticGrowth(linear=2048)})
CACHING = PROFILE.model_copy(update={"layers": (_CACHED,) * 12})


def test_it_is_the_plan_that_a_job_would_get() -> None:
    report = dry_run(job(), TOPOLOGY, PROFILE)
    assert report.plan == make_plan(job(), TOPOLOGY, PROFILE)
    assert report.alternatives == ()
    assert (report.islands, report.serving) == (None, None)
    assert PlanReport.model_validate_json(report.model_dump_json()) == report


def test_the_timeline_has_every_cell_once_and_ends_within_the_step() -> None:
    report = dry_run(job(stages=2, members_per_stage=1, microbatches=8), TOPOLOGY, PROFILE)
    cells = {(cell.stage, cell.microbatch, cell.kind) for cell in report.timeline}
    assert len(cells) == len(report.timeline) == 2 * 8 * 2
    assert report.plan.prediction is not None
    assert max(cell.stop_s for cell in report.timeline) <= report.plan.prediction.step_s


def test_a_timeline_with_too_many_cells_is_left_out() -> None:
    many = job(microbatches=1100, training={"batch_size": 1100}, stages=2, members_per_stage=1)
    assert dry_run(many, TOPOLOGY, PROFILE).timeline == ()


def test_a_strategy_can_be_tried_in_place_of_the_jobs_own() -> None:
    report = dry_run(job(), TOPOLOGY, PROFILE, strategy="uniform")
    assert report.plan.strategy == "uniform"
    with pytest.raises(UserError, match="unknown partitioning strategy"):
        dry_run(job(), TOPOLOGY, PROFILE, strategy="unifrom")


def test_all_strategies_stand_side_by_side_the_fastest_first() -> None:
    report = dry_run(job(), TOPOLOGY, PROFILE, compare=True)
    assert {one.strategy for one in report.alternatives} == set(strategy_names())
    steps = [one.step_s for one in report.alternatives if one.step_s is not None]
    assert steps == sorted(steps)
    assert report.alternatives[0].step_s == report.plan.prediction.step_s  # type: ignore[union-attr]


def test_a_strategy_that_finds_nothing_says_why() -> None:
    topology = lan(machine("large"), machine("small", memory_bytes=GIB // 4))
    report = dry_run(job(), topology, PROFILE, compare=True)
    problems = {one.strategy: one.problem for one in report.alternatives}
    assert "small lacks" in str(problems["uniform"])
    assert problems["auto"] is None
    assert report.alternatives[-1].problem is not None


def test_regions_that_are_far_apart_may_train_as_islands() -> None:
    names = "abcdef"
    links = [
        Link(one, other, *((5e-4, 1e8) if (one < "d") == (other < "d") else (0.05, 1e6)))
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]
    topology = Topology(tuple(machine(name, 50) for name in names), tuple(links))
    report = dry_run(job(microbatches=16), topology, PROFILE)
    assert report.islands is not None
    assert sorted(name for island in report.islands.islands for name in island.machines) == list(names)
    assert all(
        set(island.machines) <= set("abc") or set(island.machines) <= set("def")
        for island in report.islands.islands
    )
    assert report.plan.prediction is not None
    assert report.islands.samples_per_s > report.plan.prediction.samples_per_s


def test_rounds_have_a_plan_for_each_branch_and_their_figures() -> None:
    names = "abcdef"
    links = [
        Link(one, other, *((5e-4, 1e8) if (one < "d") == (other < "d") else (0.05, 1e6)))
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]
    links += [Link("head", name, 0.05, 1e6) for name in names]
    topology = Topology((*(machine(name, 50) for name in names), machine("slow", 1)), tuple(links))
    training = {
        "synchronization": {"kind": "local", "branches": 2, "every": 20},
        "compression": {"name": "bf16"},
    }
    report = dry_run(job(training=training), topology, PROFILE, compare=True)
    assert report.islands is None
    assert report.rounds is not None
    rounds, plan = report.rounds, report.plan
    assert [island.machines for island in rounds.islands] == [tuple("abc"), tuple("def")]
    assert [branch.number for branch in plan.branches] == [0, 1]
    assert plan.stages == plan.branches[0].stages
    assert plan.machines == set(names)
    assert [machine.name for machine in plan.idle] == ["slow"]
    # 160 million parameters with two bytes each, both ways, at 1 MB/s.
    assert rounds.contribution_bytes == rounds.update_bytes == 2 * PROFILE.parameters
    assert rounds.ratio == 2
    assert rounds.exchange_s == pytest.approx(4 * PROFILE.parameters / 1e6 + 0.1)
    step_s = plan.branches[0].step_s
    assert step_s is not None
    assert rounds.exchange_s is not None
    assert rounds.round_s is not None
    assert rounds.round_s == pytest.approx(20 * step_s + rounds.exchange_s)
    assert rounds.samples_per_s == pytest.approx(2 * 16 * 20 / rounds.round_s)
    assert rounds.lockstep_bytes == 4 * PROFILE.parameters
    plain = {"batch_size": 32, "microbatches": 8}
    lockstep = make_plan(job(training=plain), topology, PROFILE).prediction
    assert lockstep is not None
    assert rounds.lockstep_samples_per_s == lockstep.samples_per_s  # not compressed
    of_bytes, of_speed = rounds.comparison
    assert of_bytes.endswith("per step on average, 40 times less.")
    assert "samples/s; rounds compute" in of_speed
    assert PlanReport.model_validate_json(report.model_dump_json()) == report


def test_rounds_are_not_predicted_for_unknown_speeds() -> None:
    training = {"synchronization": {"kind": "local", "branches": 2}}
    rounds = dry_run(job(training=training), lan(machine("a", 0), machine("b", 0)), PROFILE).rounds
    assert rounds is not None
    assert (rounds.round_s, rounds.samples_per_s, rounds.lockstep_samples_per_s) == (None, None, None)
    small = lan(machine("a", memory_bytes=5 * GIB), machine("b", memory_bytes=5 * GIB))
    with pytest.raises(PlanInfeasible, match="2 of the 9 branches"):
        dry_run(job(training={"synchronization": {"kind": "local", "branches": 9}}), small, PROFILE)


def test_serving_is_reported_too_and_alone_where_training_does_not_fit() -> None:
    serving = ServingWorkload(prompt_tokens=64, new_tokens=16, concurrent=2)
    both = dry_run(job(), TOPOLOGY, PROFILE, serving=serving)
    assert both.serving is not None
    assert both.plan != both.serving.plan
    assert both.serving.first_token_s > both.serving.next_token_s > 0
    small = lan(machine("a", memory_bytes=GIB))
    only = dry_run(job(), small, PROFILE, serving=serving)
    assert only.serving is not None
    assert only.plan == only.serving.plan
    with pytest.raises(PlanInfeasible):
        dry_run(job(), lan(machine("a", memory_bytes=GIB // 64)), PROFILE, serving=serving)


def test_serving_that_does_not_fit_says_what_is_missing_and_what_would_fit() -> None:
    requests = ServingWorkload(prompt_tokens=64, new_tokens=16, concurrent=1_000_000)
    with pytest.raises(PlanInfeasible, match="serving 1000000 at a time") as error:
        dry_run(job(), TOPOLOGY, CACHING, serving=requests)
    details = error.value.details
    assert details["missing_bytes"] == details["needed_bytes"] - details["lent_bytes"] > 0
    fits = int(details["would_fit"][0].removeprefix("serve at most ").removesuffix(" at a time"))
    assert error.value.hint == details["would_fit"][0]
    assert dry_run(job(), TOPOLOGY, CACHING, serving=replace(requests, concurrent=fits)).serving is not None
    with pytest.raises(PlanInfeasible):
        dry_run(job(), TOPOLOGY, CACHING, serving=replace(requests, concurrent=fits + 1))


def test_serving_over_dead_links_says_so() -> None:
    topology = lan(machine("a", memory_bytes=GIB // 2), machine("b", memory_bytes=GIB // 2), bytes_per_s=0.0)
    requests = ServingWorkload(prompt_tokens=64, new_tokens=16, concurrent=2)
    with pytest.raises(PlanInfeasible, match=r"no usable links.*do not reach each other: a - b") as error:
        dry_run(job(), topology, PROFILE, serving=requests)
    one, all_ = error.value.details["would_fit"]
    assert (one.startswith("lend "), one.endswith(" more on a")) == (True, True)
    assert all_.startswith("lend 1.35 times the memory on every machine: ")
    more = int(one.partition("(")[2].partition(" bytes")[0])
    for lent, fits in ((GIB // 2 + more, True), (GIB // 2 + more - 1, False)):
        machines = machine("a", memory_bytes=lent), machine("b", memory_bytes=GIB // 2)
        with contextlib.nullcontext() if fits else pytest.raises(PlanInfeasible):
            dry_run(job(), lan(*machines, bytes_per_s=0.0), PROFILE, serving=requests)


def test_serving_that_needs_more_machines_than_there_are_says_so() -> None:
    requests = ServingWorkload(prompt_tokens=64, new_tokens=16, concurrent=2)
    pair = lan(machine("a"), machine("b"))
    with pytest.raises(PlanInfeasible, match="3 stages need 3 machines, and 2 are there") as error:
        plan_serving("model", pair, PROFILE, requests, stages=3)
    assert error.value.hint == "let 1 more machine join, or leave out stages"
    with pytest.raises(PlanInfeasible, match="13 stages cannot share 12 layers"):
        plan_serving("model", pair, PROFILE, requests, stages=13)
    apart = lan(machine("a"), machine("b"), bytes_per_s=0.0)
    with pytest.raises(PlanInfeasible, match="no usable links") as error:
        plan_serving("model", apart, PROFILE, requests, stages=2)
    assert error.value.details["would_fit"] == ["leave out stages"]


def test_serving_that_lacks_memory_says_how_many_machines_would_help() -> None:
    requests = ServingWorkload(prompt_tokens=64, new_tokens=16, concurrent=1)
    alone = machine("a", memory_bytes=GIB // 2)
    with pytest.raises(PlanInfeasible, match="are missing") as error:
        plan_serving("model", lan(alone), PROFILE, requests)
    assert error.value.details["would_fit"][-1] == "let one more machine like a (512 MiB) join"
    plan_serving("model", lan(alone, machine("b", memory_bytes=GIB // 2)), PROFILE, requests)


def test_the_gap_is_reported_in_every_form_and_never_below_zero() -> None:
    prediction = dry_run(job(), TOPOLOGY, PROFILE).plan.prediction
    assert prediction is not None
    assert prediction.gap is not None
    assert prediction.model_dump()["gap"] == prediction.gap >= 0
    assert Prediction.model_validate_json(prediction.model_dump_json()) == prediction
    assert prediction.model_copy(update={"lower_bound_s": 1.01 * prediction.step_s}).gap == 0
