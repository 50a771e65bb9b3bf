"""Each layer is timed in the first steps of an attempt, and timing changes no results."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.losses import loss_sum
from share_compute.models.stage import Stage
from share_compute.planning.cost.timings import LayerTiming
from share_compute.protocol.tree import SummationTree
from share_compute.shards import Shard
from share_compute.specification import LayerSpec, TrainingSpec
from share_compute_actors.training.member.layer_timer import LayerTimer
from share_compute_actors.training.member.runner import Runner

CPU = torch.device("cpu")
LLAMA = Blueprint(
    config={
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "vocab_size": 160, "pad_token_id": 0,
    }
)  # fmt: skip
DIGITS = Blueprint(
    layers=(
        LayerSpec(type="flatten"),
        LayerSpec(type="linear", options={"in_features": 64, "out_features": 32}),
        LayerSpec(type="relu"),
        LayerSpec(type="linear", options={"in_features": 32, "out_features": 10}),
    )
)
MICROBATCHES = 4


def stage_of(blueprint: Blueprint, start: int, stop: int) -> Stage:
    stage = build_stage(blueprint, Shard("m", start, stop, 4), CPU)
    stage.initialize(3)
    stage.module.train()
    return stage


def samples(blueprint: Blueprint) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if blueprint.config is not None:
        ids = torch.randint(3, 160, (2, 16), generator=generator)
        return ids, ids
    return torch.rand(2, 64, generator=generator), torch.randint(0, 10, (2,), generator=generator)


@pytest.mark.parametrize("blueprint", [LLAMA, DIGITS], ids=["llama", "digits"])
def test_timing_changes_no_bit_and_leaves_nothing_behind(blueprint: Blueprint) -> None:
    inputs, targets = samples(blueprint)
    gradients = []
    for timed in (False, True):
        stage = stage_of(blueprint, 0, 4)
        stage.prepare_cell(3, 1, 0)
        if timed:
            timer = LayerTimer(stage.layers, CPU)
            with timer.timing("forward"):
                outputs = stage.forward(inputs)
            with timer.timing("backward"):
                loss_sum(outputs, targets).backward()
            with torch.no_grad():  # an evaluation in between is not timed
                stage.forward(inputs)
            timings = timer.finish()
            assert sorted(timings) == [0, 1, 2, 3]
            assert all(timing.forward_s > 0 and timing.backward_s >= 0 for timing in timings.values())
            assert timings[3].backward_s > 0
            left = weakref.ref(timer)
            del timer, outputs
            gc.collect()
            assert left() is None, "a hook of a layer still refers to it"
        else:
            loss_sum(stage.forward(inputs), targets).backward()
        gradients.append([parameter.grad for parameter in stage.module.parameters()])
    for plain, timed_gradient in zip(*gradients, strict=True):
        assert plain is not None
        assert torch.equal(plain, timed_gradient)


class Busy(nn.Module):
    """Computes for this many rounds, forward and backward."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            hidden = hidden * 0.99
        return hidden


ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_time_is_booked_on_the_layer_that_took_it(device: str) -> None:
    layers = {5: Busy(1), 6: Busy(400), 7: Busy(1)}
    hidden = torch.rand(256, 256, device=device, requires_grad=True)
    layers[5](
        hidden
    ).sum().backward()  # a GPU loads its kernels at their first use, so members do not time their first step
    timer = LayerTimer(layers, torch.device(device))
    for _ in range(5):
        hidden = torch.rand(256, 256, device=device, requires_grad=True)
        with timer.timing("forward"):
            for layer in layers.values():
                hidden = layer(hidden)
        with timer.timing("backward"):
            hidden.sum().backward()
    timings = timer.finish()
    for other in (5, 7):
        assert timings[6].forward_s > 3 * timings[other].forward_s
        assert timings[6].backward_s > 3 * timings[other].backward_s


def test_a_runner_reports_its_layers_times_once() -> None:
    rows = samples(LLAMA)[0]
    training = TrainingSpec(
        steps=6, batch_size=2 * MICROBATCHES, microbatches=MICROBATCHES, sequence_length=16
    )
    first, last = (
        Runner(stage_of(LLAMA, start, start + 2), training, SummationTree((MICROBATCHES,)))
        for start in (0, 2)
    )
    reported: list[tuple[int, dict[int, LayerTiming], dict[int, LayerTiming]]] = []
    for step in range(1, 7):
        if step == 2:
            first.start_timing(step)
            last.start_timing(step)
        for microbatch in range(MICROBATCHES):
            first.forward(step, microbatch, rows)
            activation = first.kept("activation", microbatch)
            assert activation is not None
            last.forward(step, microbatch, activation.clone())
            last.backward(microbatch, rows)
            gradient = last.kept("gradient", microbatch)
            assert gradient is not None
            first.backward(microbatch, gradient)
        timings = [runner.layer_timings(step) for runner in (first, last)]
        if timings[0] is not None and timings[1] is not None:
            reported.append((step, timings[0], timings[1]))
        for runner in (first, last):
            runner.reduce([])
            runner.apply(step, 1.0)
    assert [step for step, *_ in reported] == [4]
    _, before, after = reported[0]
    assert (sorted(before), sorted(after)) == ([0, 1], [2, 3])
    assert all(
        timing.forward_s > 0 and timing.backward_s > 0 for timing in (*before.values(), *after.values())
    )
