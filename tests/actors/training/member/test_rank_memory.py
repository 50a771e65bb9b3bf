"""Ranks have the present parts of the weights. Parts of a CPU exchange them by gloo, as GPUs do by NCCL."""

from __future__ import annotations

import gc
import os
import queue
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any

import psutil
import pytest
import torch
from tests.actors.training.member.test_faulty_engine import Member
from tests.actors.training.member.test_ranks import BATCH, LENGTH, LLAMA, MODELS, loss_of, stage_of
from torch import Tensor

from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.errors import ContributorLost, OutOfMemory, ShareComputeError
from share_compute.models.blueprint import Blueprint
from share_compute.models.stage import Stage
from share_compute.models.storage.weights import copy_into
from share_compute.protocol.member_events import Loaded
from share_compute.protocol.membership import Membership, fresh
from share_compute.protocol.messages import Applied, Commit, Form, Halt, Prepared, Proceed
from share_compute.protocol.tree import SummationTree
from share_compute.sharding.outdated import Outdated
from share_compute.specification import TrainingSpec
from share_compute.training.optimizers import restore_optimizer
from share_compute_actors.group.ranks.processes import RankDevices
from share_compute_actors.training.member.ranks import Ranks
from share_compute_actors.training.member.runner import Runner

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

GEMMA = {
    **LLAMA,
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
"""An architecture whose layers have buffers."""
PARTS = RankDevices("cpu", 2, has_own_memory=True)
TRAINING = TrainingSpec.model_validate(
    {"steps": 20, "batch_size": 2 * BATCH, "microbatches": 2, "optimizer": {"learning_rate": 0.02}}
)
BRANCH = TrainingSpec.model_validate(
    {
        **TRAINING.model_dump(exclude_unset=True),
        "synchronization": {"kind": "local", "branches": 2, "every": 2},
    }
)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with closing(Ranks(2, 2, 120, devices=PARTS)) as found:
        yield found


def divided(ranks: Ranks, blueprint: Blueprint = MODELS["llama"]) -> Stage:
    stage = stage_of(blueprint)
    ranks.divide(stage, blueprint, BATCH, LENGTH)
    return initialized(stage)


def initialized(stage: Stage) -> Stage:
    stage.initialize(3)
    return stage


def require_current(stage: Stage, blueprint: Blueprint = MODELS["llama"]) -> float:
    """Assert that the ranks compute with the present weights, and return the loss."""
    alone = stage_of(blueprint)
    with torch.no_grad():
        for name, tensor in alone.persistent().items():
            tensor.copy_(stage.persistent()[name])
        found, expected = (loss_of(each, blueprint, 1).item() for each in (stage, alone))
    assert found == pytest.approx(expected, abs=1e-5)
    return found


def ids_of(step: int, microbatch: int) -> Tensor:
    """Return inputs and targets of a microbatch ``[2, batch, seq]``."""
    draw = torch.Generator().manual_seed(10 * step + microbatch)
    return torch.randint(0, 64, (2, BATCH, LENGTH), generator=draw)


def cells(runner: Runner, step: int) -> None:
    for microbatch in range(2):
        inputs, targets = ids_of(step, microbatch)
        runner.forward(step, microbatch, inputs)
        runner.backward(microbatch, targets)


def take_step(runner: Runner, step: int, ranks: Ranks | None = None) -> tuple[str, float]:
    """Take a step, and return the digest of its gradient, and its loss."""
    cells(runner, step)
    runner.reduce([])
    found = runner.gradients.digest(), sum(runner.losses().values())
    runner.apply(step, 1.0)
    if ranks is not None:
        ranks.outdate(Outdated.trained)  # as the engine does
    return found


class Samples:
    """The samples of a member that has the whole model, without a shard store."""

    def input(self, step: int, microbatch: int) -> Tensor:
        return ids_of(step, microbatch)[0]

    def target(self, step: int, microbatch: int) -> Tensor:
        return ids_of(step, microbatch)[1]

    def expect(self, *_: object) -> None:
        """Prefetch nothing."""

    def forget(self, step: int) -> None:
        """Keep nothing."""


def test_a_member_trains_as_one_process() -> None:
    """Messages of the coordinator make the member's engine take steps."""
    alone = Runner(initialized(stage_of(MODELS["llama"])), TRAINING, SummationTree((2,)))
    member, lost = Member(None), list[ShareComputeError]()
    engine, ranks = member.engine, Ranks(2, 2, 120, lost.append, devices=PARTS)
    engine.outdate = ranks.outdate
    runner = engine.order(lambda: Runner(divided(ranks), TRAINING, SummationTree((2,))))
    engine.receive(Halt(1, committed=0))
    samples: Any = Samples()
    engine.order(lambda: engine.equip(runner, samples, Loaded(1, 0)))
    owners = (("ann", "ann"),)
    membership = Membership(1, ((0, 2),), (("ann",),), owners, step=1, tasks=fresh(owners))
    engine.receive(Form(membership))
    losses, expected = list[float](), list[float]()
    while len(losses) < 4:
        message = member.reported.get(timeout=120)
        assert not isinstance(message, ShareComputeError), message
        if isinstance(message, Prepared):
            losses.append(sum(message.losses.values()))
            expected.append(take_step(alone, message.step)[1])
            engine.receive(Commit(1, message.step, pauses=message.step == 2))
        elif isinstance(message, Applied):
            # Other work than cells changes weights, in a way that torch's version counters do not show.
            engine.order(partial(scale, runner.stage))
            scale(alone.stage)
            engine.receive(Proceed(1, message.step + 1))
    assert losses == pytest.approx(expected, abs=1e-5 * 2 * BATCH * LENGTH)
    assert not lost
    engine.order(ranks.close)


def scale(stage: Stage) -> None:
    for parameter in stage.parameters().values():
        parameter.data.mul_(1.5)


def test_ranks_see_every_change_of_the_weights(ranks: Ranks) -> None:
    stage = divided(ranks)
    runner = Runner(stage, BRANCH, SummationTree((2,)))
    runner.begin_branch(0)
    weights = {name: tensor.clone() for name, tensor in stage.persistent().items()}
    layer = next(name for name in weights if "layers.0" in name and "gate_proj" in name)

    def merge() -> None:
        assert runner.branch is not None
        update: dict[str, Tensor] = {}
        for name, payload in runner.branch.contribution().items():
            shape = runner.parameters[name].shape
            change = codec_of_round(BRANCH, 1).decode(payload, shape) / 2
            codec = codec_of_update(BRANCH, 1)
            update[name] = codec.encode(change, codec.begin(name, change.shape))[0]
        runner.merge(1, 0, update, closes_round=True)

    def load_checkpoint() -> None:
        for name, tensor in weights.items():
            copy_into(stage.persistent()[name], 0, None, tensor.numpy().view("uint8").reshape(-1))

    def write_without_version() -> None:
        """Change a weight as members do that get another member's share of the update."""
        stage.parameters()[layer].data.mul_(5)
        ranks.outdate(Outdated.trained)

    losses = [require_current(stage)]
    changes: list[Callable[[], object]] = [
        lambda: take_step(runner, 1, ranks),
        lambda: take_step(runner, 2, ranks),
        merge,
        write_without_version,
        load_checkpoint,
    ]
    for change in changes:
        change()
        losses.append(require_current(stage))
    assert all(abs(one - other) > 1e-3 for one, other in pairwise(losses))
    assert losses[-1] == losses[0]


def test_weights_beside_frozen_ones_change(ranks: Ranks) -> None:
    blueprint = Blueprint(config=LLAMA, freeze=("model.layers.*.mlp.*",))
    stage = divided(ranks, blueprint)
    runner = Runner(stage, TRAINING, SummationTree((2,)))
    for step in (1, 2):
        take_step(runner, step, ranks)
        require_current(stage, blueprint)


def test_parameters_may_be_sent_again_while_cells_are_open(ranks: Ranks) -> None:
    """An order in the middle of a step, such as a copy for a backup, outdates buffers that cells have kept."""
    blueprint = Blueprint(config=GEMMA)
    stage = divided(ranks, blueprint)
    loss = loss_of(stage, blueprint, 1)
    ranks.outdate(Outdated.everything)
    (loss_of(stage, blueprint, 2) + loss).backward()
    assert all(each.grad is not None for each in stage.trained().values())


def test_a_stage_that_is_in_use_no_more_is_freed(ranks: Ranks) -> None:
    blueprint = Blueprint(config=LLAMA)
    stage = stage_of(blueprint)
    kept = weakref.ref(ranks.divide(stage, blueprint, BATCH, LENGTH))
    stage.initialize(3)
    loss_of(stage, blueprint, 1).backward()
    del stage
    gc.collect()
    assert kept() is None


@pytest.mark.exact
def test_a_killed_rank_changes_no_bit() -> None:
    """After the loss, new ranks continue with the weights and the optimizer's state of the last committed step."""
    found = []
    for kills in (False, True):
        lost, digests, kept = list[ShareComputeError](), list[str](), ({}, {})
        ranks = Ranks(2, 2, 120, lost.append, devices=PARTS)
        runner = Runner(divided(ranks), TRAINING, SummationTree((2,)))
        step = 1
        while step <= 4:
            if kills and step == 3 and not lost:
                draw = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
                runner.forward(step, 0, draw)
                os.kill(ranks.process_ids[0], signal.SIGKILL)
                with pytest.raises(ContributorLost, match="rank 1 was ended by signal 9"):
                    runner.backward(0, draw)
                assert {each.details.get("ends_member") for each in lost} == {True}
                runner = Runner(divided(ranks), TRAINING, SummationTree((2,)))  # with new processes
                with torch.no_grad():
                    for name, tensor in runner.stage.persistent().items():
                        tensor.copy_(kept[0][name])
                assert runner.optimizer is not None
                restore_optimizer(runner.optimizer, runner.parameters, kept[1])
            digests.append(take_step(runner, step, ranks)[0])
            kept = tuple(
                {name: tensor.clone() for name, tensor in tensors.items()}
                for tensors in (runner.stage.persistent(), runner.state_tensors())
            )
            step += 1
        found.append((digests, kept[0]))
        ranks.close()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())


def test_the_end_of_a_rank_is_reported_while_no_rank_is_needed() -> None:
    lost: queue.SimpleQueue[ShareComputeError] = queue.SimpleQueue()
    ranks = Ranks(2, 2, 120, lost.put, devices=PARTS)
    divided(ranks)
    os.kill(ranks.process_ids[0], signal.SIGKILL)
    assert "rank 1 was ended by signal 9" in lost.get(timeout=60).message
    ranks.close()


def test_a_rank_without_memory_is_no_lost_rank() -> None:
    lost: list[ShareComputeError] = []
    ranks = Ranks(2, 2, 120, lost.append, devices=PARTS)
    wide = Blueprint(config={**LLAMA, "intermediate_size": 1 << 17})
    stage = divided(ranks, wide)
    child = psutil.Process(ranks.process_ids[0])
    child.rlimit(psutil.RLIMIT_AS, (child.memory_info().vms,) * 2)
    with pytest.raises(OutOfMemory, match="in rank 1"):
        loss_of(stage, wide, 1)
    # The end of the rank may have been reported before the transfer failed.
    assert all(isinstance(each, OutOfMemory) for each in lost)
    require_current(divided(ranks))  # new processes
    ranks.close()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_ranks_compute_in_two_bytes(ranks: Ranks, precision: str) -> None:
    """Their loss is as near to that in float32 as the loss of one process is."""
    tolerance = {"bfloat16": 2e-2, "float16": 4e-3}[precision]
    for model in ("llama", "vit", "declared", "recomputed"):
        exact = MODELS[model]
        blueprint = exact.model_copy(update={"precision": precision})
        together, alone, reference = divided(ranks, blueprint), stage_of(blueprint), stage_of(exact)
        losses = []
        for stage, own in ((reference, exact), (alone, blueprint), (together, blueprint)):
            stage.initialize(3)
            losses.append(loss_of(stage, own, 1))
            losses[-1].backward()
        values = [loss.item() for loss in losses]
        assert values[2] == pytest.approx(values[0], abs=tolerance)
        assert values[2] == pytest.approx(values[1], abs=tolerance)
        for name, parameter in alone.trained().items():
            found, expected = together.trained()[name].grad, parameter.grad
            assert found is not None, name
            assert expected is not None, name
            assert found.dtype == torch.float32
            assert (found - expected).norm() <= 3 * tolerance * (expected.norm() + 1e-2), name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices here")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ranks_train_on_gpus_of_their_own(precision: str) -> None:
    tolerance = 1e-4 if precision == "float32" else 5e-2
    blueprint = Blueprint(config=LLAMA, precision=precision)
    runs = []
    for is_divided in (False, True, True):
        ranks = Ranks(2, 2, 120, devices=RankDevices.of("cuda", 2))
        stage = stage_of(blueprint, torch.device("cuda"))
        if is_divided:
            ranks.divide(stage, blueprint, BATCH, LENGTH)
        stage.initialize(3)
        runner = Runner(stage, TRAINING, SummationTree((2,)))
        runs.append([take_step(runner, step, ranks) for step in range(1, 5)])
        ranks.close()
    assert runs[1] == runs[2]
    losses = [[loss for _, loss in run] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices here")
def test_a_lost_gpu_is_reported_while_the_other_waits_for_it() -> None:
    lost: queue.SimpleQueue[ShareComputeError] = queue.SimpleQueue()
    ranks = Ranks(2, 2, 120, lost.put, devices=RankDevices.of("cuda", 2))
    stage = stage_of(MODELS["llama"], torch.device("cuda"))
    ranks.divide(stage, MODELS["llama"], BATCH, LENGTH)
    stage.initialize(3)
    runner = Runner(stage, TRAINING, SummationTree((2,)))
    take_step(runner, 1)
    os.kill(ranks.process_ids[0], signal.SIGKILL)
    assert "rank 1 was ended by signal 9" in lost.get(timeout=60).message
    ranks.close()
