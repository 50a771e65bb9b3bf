"""Inputs of the plan that an attempt makes; without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.platform.planning.models import lan, machine

from share_compute.errors import PlanInfeasible
from share_compute.lifecycle.attempt_events import Assignment
from share_compute.models.blueprint import Blueprint
from share_compute.planning.cost.timings import LayerTiming, MachineTimings
from share_compute.planning.plan_file import pinned_plan
from share_compute.specification import LayerSpec, TrainJob, parse_job
from share_compute.training.loss_scale import LossScale
from share_compute_actors.training.coordinator.planning import plan_attempt
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


def layers_of(assignment: Assignment, notes: Notes, microbatches: int | None) -> dict[str, int]:
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
    stages = plan_attempt(assignment, facts, TOPOLOGY, notes).plan.stages
    return {stage.members[0].name: stage.stop - stage.start for stage in stages}


class Notes(list[tuple[str, str]]):
    """The level and the text of each line that an attempt adds to the job's log."""

    def __call__(self, message: str, level: str = "info") -> None:
        self.append((level, message))


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
    notes = Notes()
    first = Assignment(job_id="job", attempt=1, spec=spec(), topology=TOPOLOGY, folder=tmp_path)
    even = layers_of(first, notes, settled)
    assert notes == []
    again = first.model_copy(update={"attempt": 2, "timings": timings})
    resumed = layers_of(again, notes, settled)
    if is_used:
        assert resumed["a"] < min(3, even["a"])
        ((_, note),) = notes
        assert "8 measured times of layers" in note
    else:
        assert resumed == even
        assert notes == []


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
    notes = Notes()
    first = Assignment(job_id="job", attempt=1, spec=spec(microbatches=4), topology=TOPOLOGY, folder=tmp_path)
    plan = plan_attempt(first, facts, TOPOLOGY, notes).plan
    document = first.spec.model_dump(mode="json")
    document["parallelism"] = {"plan": pinned_plan(plan).model_dump(mode="json")}
    assigned = first.model_copy(update={"spec": parse_job(document)})
    assert plan_attempt(assigned, facts, TOPOLOGY, notes).plan.strategy == "pinned"
    alone = lan(machine("b"))
    with pytest.raises(PlanInfeasible, match="a is not among the job's machines; ready are b"):
        plan_attempt(assigned, facts, alone, notes)
    assert notes == []
    again = assigned.model_copy(update={"attempt": 2, "has_run": True})
    assert plan_attempt(again, facts, TOPOLOGY, notes).plan.strategy == "pinned"
    assert notes == []
    # A store without a checkpoint does not fix the number of microbatches; a later attempt must find the pinned one.
    new = replace(facts, microbatches=None)
    moved = plan_attempt(again, new, alone, notes).plan
    assert (moved.machines, moved.microbatches) == ({"b"}, 4)
    level, note = notes.pop()
    assert level == "warning"
    assert note.startswith("the pinned plan no longer holds, and the job is planned anew: ")
    other = replace(facts, microbatches=8)
    assert plan_attempt(again, other, TOPOLOGY, notes).plan.microbatches == 8
    assert "it has 4 microbatches, and the job has 8" in notes.pop()[1]
    assert notes == []
