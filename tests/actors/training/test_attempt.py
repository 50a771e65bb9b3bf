"""Inputs of the plan that an attempt makes; without Ray."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.platform.planning.models import lan, machine

from share_compute.errors import PlanInfeasible
from share_compute.lifecycle.attempt_events import Assignment, AttemptEvent, Note
from share_compute.models.blueprint import Blueprint
from share_compute.planning.cost.timings import LayerTiming, MachineTimings
from share_compute.planning.plan_file import pinned_plan
from share_compute.specification import LayerSpec, TrainJob, parse_job
from share_compute.training.loss_scale import LossScale
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.training.coordinator.attempt import TrainingAttempt
from share_compute_actors.training.coordinator.connections import Connections
from share_compute_actors.training.shard_store import ShardStoreFacts, TrainingState

LAYERS = tuple(LayerSpec(type="linear", options={"in_features": 64, "out_features": 64}) for _ in range(8))
TOPOLOGY = lan(machine("a"), machine("b"))


def spec(**training: Any) -> TrainJob:
    return parse_job(
        {
            "model": {"layers": [layer.model_dump() for layer in LAYERS]},
            "data": {"dataset": "digits"},
            "training": {"batch_size": 32, **training},
            "parallelism": {"stages": 2, "members_per_stage": 1},
        }
    )


def layers_of(attempt: TrainingAttempt, microbatches: int | None) -> dict[str, int]:
    """Return how many layers each machine gets, if the shard store fixed this number of microbatches."""
    facts = ShardStoreFacts(
        blueprint=Blueprint(layers=LAYERS),
        sizes={},
        state=TrainingState(0, LossScale()),
        has_weights=False,
        microbatches=microbatches,
        runs=None,
        notes=(),
    )
    stages = attempt._plan(facts, TOPOLOGY).plan.stages
    return {stage.members[0].name: stage.stop - stage.start for stage in stages}


def connections(reported: queue.Queue[AttemptEvent]) -> Connections:
    return Connections(reported.put, ControlRequests(), queue.SimpleQueue(), queue.SimpleQueue())


@pytest.mark.parametrize(
    ("settled", "is_used"), [(4, True), (8, False), (None, False)], ids=["same", "another", "open"]
)
def test_a_resumed_attempt_plans_with_what_was_timed(
    tmp_path: Path, settled: int | None, is_used: bool
) -> None:
    slow = {layer: LayerTiming(0.3, 0.6) for layer in range(4)}
    fast = {layer: LayerTiming(0.1, 0.2) for layer in range(4, 8)}
    timings = {
        name: MachineTimings(microbatch_size=8, device=TOPOLOGY[name].device, layers=layers)
        for name, layers in (("a", slow), ("b", fast))
    }
    reported: queue.Queue[AttemptEvent] = queue.Queue()
    first = Assignment(job_id="job", attempt=1, spec=spec(), topology=TOPOLOGY, folder=tmp_path)
    fresh = TrainingAttempt(first, connections(reported))
    even = layers_of(fresh, settled)
    assert reported.empty()
    again = first.model_copy(update={"attempt": 2, "timings": timings})
    resumed = TrainingAttempt(again, connections(reported))
    if is_used:
        assert layers_of(resumed, settled)["a"] < min(3, even["a"])
        note = reported.get_nowait()
        assert isinstance(note, Note)
        assert "8 measured times of layers" in note.message
    else:
        assert layers_of(resumed, settled) == even
        assert reported.empty()


def test_a_pinned_plan_is_a_wish_once_the_job_has_run(tmp_path: Path) -> None:
    facts = ShardStoreFacts(
        blueprint=Blueprint(layers=LAYERS),
        sizes={},
        state=TrainingState(0, LossScale()),
        has_weights=False,
        microbatches=4,
        runs=None,
        notes=(),
    )
    reported: queue.Queue[AttemptEvent] = queue.Queue()
    first = Assignment(job_id="job", attempt=1, spec=spec(microbatches=4), topology=TOPOLOGY, folder=tmp_path)
    plan = TrainingAttempt(first, connections(reported))._plan(facts, TOPOLOGY).plan
    document = first.spec.model_dump(mode="json")
    document["parallelism"] = {"plan": pinned_plan(plan).model_dump(mode="json")}
    assigned = first.model_copy(update={"spec": parse_job(document)})
    assert TrainingAttempt(assigned, connections(reported))._plan(facts, TOPOLOGY).plan.strategy == "pinned"
    alone = lan(machine("b"))
    with pytest.raises(PlanInfeasible, match="a is not among the job's machines; ready are b"):
        TrainingAttempt(assigned, connections(reported))._plan(facts, alone)
    assert reported.empty()
    again = assigned.model_copy(update={"attempt": 2, "has_run": True})
    assert TrainingAttempt(again, connections(reported))._plan(facts, TOPOLOGY).plan.strategy == "pinned"
    assert reported.empty()
    # A store without a checkpoint does not fix the number of microbatches; a later attempt must find the pinned one.
    new = replace(facts, microbatches=None)
    moved = TrainingAttempt(again, connections(reported))._plan(new, alone).plan
    assert (moved.machines, moved.microbatches) == ({"b"}, 4)
    note = reported.get_nowait()
    assert isinstance(note, Note)
    assert note.level == "warning"
    assert note.message.startswith("the pinned plan no longer holds, and the job is planned anew: ")
    other = replace(facts, microbatches=8)
    assert TrainingAttempt(again, connections(reported))._plan(other, TOPOLOGY).plan.microbatches == 8
    note = reported.get_nowait()
    assert isinstance(note, Note)
    assert "it has 4 microbatches, and the job has 8" in note.message
