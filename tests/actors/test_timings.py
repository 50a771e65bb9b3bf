"""Each layer is timed in the first steps of an attempt, and nothing but time is taken."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from share_compute.models.blueprint import Blueprint, Stage, build_stage, loss_sum
from share_compute.planning.partitioning import Shard
from share_compute.specification import LayerSpec, TrainingSpec
from share_compute_actors.channel import Channel, Keys
from share_compute_actors.layer_timer import LayerTimer
from share_compute_actors.messages import MemberId, MemberSetup, Peer, StepResult
from share_compute_actors.runner import Runner

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
        hooks = [len(layer._forward_hooks) for layer in stage.layers.values()]
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
        else:
            loss_sum(stage.forward(inputs), targets).backward()
        assert [len(layer._forward_hooks) for layer in stage.layers.values()] == hooks
        gradients.append([parameter.grad for parameter in stage.module.parameters()])
    for plain, timed_gradient in zip(*gradients, strict=True):
        assert plain is not None
        assert torch.equal(plain, timed_gradient)


class Busy(nn.Module):
    """Is busy for so many rounds, forward and backward."""

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


@pytest.fixture
def runners() -> Iterator[list[Runner]]:
    """Give two pools of one member each, linked by real channels."""
    ids, keys = [MemberId(0, 0), MemberId(1, 0)], [Keys.issue(), Keys.issue()]
    names = {me: f"machine-{me.pool}" for me in ids}
    training = TrainingSpec(
        steps=6, batch_size=2 * MICROBATCHES, microbatches=MICROBATCHES, sequence_length=16
    )
    with ExitStack() as stack:
        channels = []
        for me in ids:
            admitted = [pair.public for pair in keys]
            channel = Channel("job", 1, "127.0.0.1", keys[me.pool], admitted)
            stack.callback(channel.close)
            channels.append(channel)
        for me, other in (ids, ids[::-1]):
            there = channels[other.pool].endpoint
            channels[me.pool].connect(Peer(other, names[other], there, keys[other.pool].public))
        yield [
            Runner(
                MemberSetup(
                    job="job", epoch=1, me=me, name=names[me], address="127.0.0.1", blueprint=LLAMA,
                    shard=Shard("m", 2 * me.pool, 2 * me.pool + 2, 4), training=training,
                    microbatches=tuple(range(MICROBATCHES)), shares=((MICROBATCHES,), (MICROBATCHES,)),
                    threads=1, device="cpu", deadline_s=30.0, first_step=1,
                ),
                stage_of(LLAMA, 2 * me.pool, 2 * me.pool + 2),
                channels[me.pool],
                names,
                None,
            )
            for me in ids
        ]  # fmt: skip


def test_members_tell_their_layers_times_once(runners: list[Runner]) -> None:
    rows: Any = dict.fromkeys(range(MICROBATCHES), samples(LLAMA)[0])

    def train(runner: Runner) -> list[StepResult]:
        return [runner.step(number, rows, rows) for number in range(1, 7)]

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(train, runners))
    for own, results in zip(([0, 1], [2, 3]), told, strict=True):
        assert [result.step for result in results if result.layer_timings is not None] == [4]
        timings = results[3].layer_timings
        assert timings is not None
        assert sorted(timings) == own
        computing = sum(timing.forward_s + timing.backward_s for timing in timings.values()) * MICROBATCHES
        worked = sum(result.seconds - result.waited_s for result in results[1:4]) / 3
        assert 0.05 * worked < computing <= worked
