"""Plans know the memory and the time of images in tiles, and the memory of a full batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.platform.planning.instances import instance
from tests.platform.planning.models import machine

from share_compute.errors import PlanInfeasible
from share_compute.models.blueprint import blueprint_of
from share_compute.models.factory import dissect
from share_compute.models.profiles.profile import QuadraticGrowth
from share_compute.planning.cost.cost import TrainingCost
from share_compute.planning.cost.layout import Layout, StageLayout
from share_compute.planning.planner import Solution, solve, workload
from share_compute.specification import TrainJob, parse_job
from share_compute.topology import Topology


def convolution(inputs: int, outputs: int) -> dict[str, Any]:
    return {
        "type": "conv2d",
        "options": {"in_channels": inputs, "out_channels": outputs, "kernel_size": 3, "padding": 1},
    }


BLOCK = [
    convolution(3, 16),
    {"type": "relu"},
    convolution(16, 16),
    {"type": "relu"},
    {"type": "max_pool2d", "options": {"kernel_size": 8}},
]
LAYERS = [
    {"type": "sequential", "layers": BLOCK},
    {"type": "flatten"},
    {"type": "linear", "options": {"in_features": 16 * 32 * 32, "out_features": 10}},
]


def job(slicing: Any) -> TrainJob:
    return parse_job(
        {
            "model": {"layers": LAYERS},
            "data": {"files": ["pictures"], "images": {"height": 256, "width": 256}, "slicing": slicing},
            "training": {"batch_size": 4, "microbatches": 4},
            "parallelism": {"stages": 1, "members_per_stage": 1, "backups": False},
        }
    )


def planned(slicing: Any, memory_bytes: int) -> Solution:
    spec = job(slicing)
    return solve(
        spec, Topology((machine("a", memory_bytes=memory_bytes),)), dissect(blueprint_of(spec, None)), 0, {}
    )


def test_tiles_fit_where_whole_images_do_not() -> None:
    whole, cut = (planned(slicing, 10**9) for slicing in ("data_parallel", [1, 1, 2, 2]))
    needs = [solution.plan.stages[0].members[0].memory_bytes for solution in (whole, cut)]
    activations = whole.cost.activation_bytes[1]
    assert needs[0] - needs[1] > 0.65 * activations
    assert whole.timeline is not None
    assert cut.timeline is not None
    assert 1.2 < cut.timeline.step_s / whole.timeline.step_s < 1.6  # one more forward of the block, and halos
    between = int((needs[0] + needs[1]) / 2 / 0.9)
    assert planned([1, 1, 2, 2], between).plan.stages[0].members[0].memory_bytes == needs[1]
    with pytest.raises(PlanInfeasible):
        planned("data_parallel", between)


def bytes_of_members(cost: TrainingCost) -> list[float]:
    layout = Layout((StageLayout(0, 2, (0,), (4,)), StageLayout(2, 4, (1,), (4,))))
    return [cost.member_bytes(layout, place, 0) for place in (0, 1)]


def test_memory_of_tiles_and_of_a_full_batch_by_hand() -> None:
    cost = instance(1, machines=2, layers=4, microbatches=4)
    first, last = bytes_of_members(cost)
    layers = cost.profile.layers
    tiled = layers[0].model_copy(update={"recomputed_bytes": QuadraticGrowth(1000.0)})
    profile = cost.profile.model_copy(update={"layers": (tiled, *layers[1:])})
    in_tiles = replace(cost, profile=profile)
    assert bytes_of_members(in_tiles) == [first + 1000 * cost.workload.microbatch_size, last]
    full = replace(cost, workload=replace(cost.workload, batch_bytes=500.0))
    assert bytes_of_members(full) == [first + 2 * 500, last]


def test_a_full_batch_counts_the_inputs_of_a_step() -> None:
    assert workload(job("full_batch"), 4).batch_bytes == 4 * 4 * 3 * 256 * 256
    assert workload(job("data_parallel"), 4).batch_bytes == 0
    text = {"files": ["a.txt"], "slicing": "full_batch"}
    model = {"config": {"model_type": "llama"}}
    training = {"batch_size": 8, "sequence_length": 32}
    spec = parse_job({"model": model, "data": text, "tokenizer": {"vocab_size": 300}, "training": training})
    assert workload(spec, 4).batch_bytes == 8 * 8 * 32
