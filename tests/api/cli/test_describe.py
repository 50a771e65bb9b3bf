"""Description of a running job: prediction beside measurement, and the reason for each machine."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from share_compute.lifecycle.attempt_events import (
    AttemptEvent,
    BranchRound,
    LayersTimed,
    Measured,
    Reformed,
    ReplanAbandoned,
    ReplanProposed,
    RoundMerged,
    Sampled,
    StageTiming,
)
from share_compute.planning.cost.timings import LayerTiming, MachineTimings
from share_compute.planning.plan import Bottleneck, IdleMachine, MemberPlan, Plan, Prediction, StagePlan
from share_compute.store.records import EventRecord
from share_compute.topology import Device
from share_compute_api.terminal.describe import bound_text, event_line, plan_lines, step_speed, step_times


def plan(*, predicted: bool = True) -> Plan:
    member = MemberPlan(
        contributor_id="a", name="ada", microbatches=(0, 1), memory_bytes=1, reason="holds layers 0-3: [fast]"
    )
    prediction = Prediction(
        step_s=1.2,
        formula_s=1.1,
        lower_bound_s=1.0,
        samples_per_s=13.3,
        tokens_per_s=1700.0,
        bottleneck=Bottleneck(kind="compute", where="ada", sentence="ada computes at 52 GFLOP/s"),
        exact=False,
    )
    return Plan(
        epoch=0,
        strategy="auto",
        num_layers=4,
        parameters=9,
        stages=(StagePlan(start=0, stop=4, parameters=9, members=(member,)),),
        microbatches=2,
        idle=(IdleMachine(contributor_id="b", name="bob", reason="its link carries 3.0 MB/s"),),
        prediction=prediction if predicted else None,
    )


def measured(predicted_step_s: float | None) -> Measured:
    busy = None if predicted_step_s is None else 1.1
    return Measured(
        step=20,
        predicted_step_s=predicted_step_s,
        measured_step_s=1.5,
        stages=(StageTiming(predicted_busy_s=busy, measured_busy_s=1.4),),
    )


def line(event: AttemptEvent) -> str:
    data: dict[str, Any] = event.model_dump(mode="json", exclude={"type"})
    record = EventRecord(
        seq=1, job_id="j", contributor_id=None, attempt=1, kind=event.type, at=datetime.now(UTC), data=data
    )
    return event_line(record)


@pytest.mark.parametrize(("tokens", "unit"), [(16, "samples/s"), (2048, "tokens/s")])
def test_samples_that_are_no_text_are_not_called_tokens(tokens: int, unit: str) -> None:
    step = {"tokens_per_s": 1234.5, "tokens": tokens, "samples": 16}
    assert step_speed(step) == f"1,234 {unit}"


def test_measured_steps_stand_beside_predicted_ones() -> None:
    assert step_times(measured(1.2)) == (
        "step 1.50 s, predicted 1.20 s (+25%); stages busy 93% (predicted 92%) of it"
    )
    assert "measured at step 20" in line(measured(1.2))


def test_without_a_prediction_nothing_is_compared() -> None:
    assert step_times(measured(None)) == "step 1.50 s, nothing was predicted"


def test_times_of_layers_are_shown_in_one_line() -> None:
    device = Device("cpu", "some cpu", 2**30)
    timed = MachineTimings(microbatch_size=4, device=device, layers={0: LayerTiming(0.1, 0.2)})
    assert line(LayersTimed(step=4, machines={"a": timed})).endswith("layers timed up to step 4 on 1 machine")
    both = LayersTimed(step=4, machines={"a": timed, "b": timed})
    assert line(both).endswith("layers timed up to step 4 on 2 machines")


def test_a_proposal_says_what_it_saves_and_where_layers_go() -> None:
    proposal = ReplanProposed(
        step=30, plan=plan(), current_step_s=1.5, gain_s=90, move_cost_s=31, sentence="layers [moved] pay"
    )
    assert r"layers \[moved] pay" in line(proposal)
    assert "layers 0-3: ada; idle: bob" in line(proposal)
    given_up = ReplanAbandoned(reason="the job cannot have bob [gpu]")
    assert r"given up[/yellow]  the job cannot have bob \[gpu]" in line(given_up)


@pytest.mark.parametrize(
    ("recomputed", "again"),
    [(0, ""), (1, ", 1 microbatch computed again"), (3, ", 3 microbatches computed again")],
)
def test_an_epoch_says_who_came_and_went_and_what_it_cost(recomputed: int, again: str) -> None:
    epoch = Reformed(
        epoch=3, step=7, plan=plan(), seconds=0.8, recomputed=recomputed, sentence="bob [gpu] was lost"
    )
    assert line(epoch).endswith(
        rf"epoch 3  bob \[gpu] was lost; no step for 800.0 ms{again}: layers 0-3: ada; idle: bob"
    )


def test_every_machine_of_a_plan_has_its_reason() -> None:
    assert plan_lines(plan()) == [
        (
            "predicted",
            "1.20 s in a step; no plan takes less than 1.00 s; this one is 20.0% above, the best that was found",
        ),
        ("bottleneck", "ada computes at 52 GFLOP/s"),
        ("ada", "holds layers 0-3: [fast]"),
        ("bob", "idle: its link carries 3.0 MB/s"),
    ]
    assert [name for name, _ in plan_lines(plan(predicted=False))] == ["ada", "bob"]


def test_a_plan_that_reaches_its_bound_is_not_called_the_best_twice() -> None:
    prediction = plan().prediction
    assert prediction is not None
    best = prediction.model_copy(update={"lower_bound_s": prediction.step_s})
    assert bound_text(best) == "no plan takes less than 1.20 s, and this one reaches that"


def test_a_sample_is_one_line_with_prompt_and_text() -> None:
    event = Sampled(step=20, prompt="The [bold] one", text=" and\nthe")
    assert line(event).endswith(r"sample at step 20  [dim]The \[bold] one[/dim] and the")


def a_round(*, age: int, waited_s: float, update_bytes: int, distance: float | None) -> RoundMerged:
    branches = tuple(
        BranchRound(
            number=number,
            round=7 - age * number,
            machines=("a",),
            loss=2.0,
            samples=8,
            seconds=9.0,
            waited_s=waited_s,
            sent_bytes=100,
        )
        for number in range(2)
    )
    return RoundMerged(
        round=7,
        step=28,
        branches=branches,
        update_bytes=update_bytes,
        weight_bytes=4000,
        consensus_distance=distance,
        merge_s=0.1,
    )


def test_a_round_shows_compression_computing_staleness_and_consensus() -> None:
    shown = line(a_round(age=2, waited_s=1.0, update_bytes=300, distance=0.0625))
    assert "20 times less than float32" in shown
    assert "computing 90% of the time until the merge" in shown
    assert "contributions up to 2 rounds old" in shown
    assert "consensus distance 0.0625" in shown


def test_a_round_does_not_show_figures_that_do_not_apply() -> None:
    shown = line(a_round(age=0, waited_s=0.0, update_bytes=7900, distance=None))
    for part in ("float32", "computing", "old", "consensus"):
        assert part not in shown
