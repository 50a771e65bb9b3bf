"""Merges in a member's runner and in its backup copies, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.actors.training.backups.test_copies import directly
from tests.actors.training.backups.test_followers import (
    CPU,
    OPTIMIZERS,
    WHOLE,
    Trainer,
    fetched,
    follow,
    same,
)
from tests.conftest import wait_for
from torch import Tensor

from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.errors import ShareComputeError
from share_compute.protocol.membership import ShardPart
from share_compute.protocol.tree import SummationTree
from share_compute.training.optimizers import restore_optimizer
from share_compute_actors.messages import Followed
from share_compute_actors.training.backups.copies import Copies
from share_compute_actors.training.backups.copy_quota import CopyQuota
from share_compute_actors.training.backups.copying import Copier
from share_compute_actors.training.backups.followers import Follower
from share_compute_actors.training.backups.logs import gradient_messages
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.saving import folder_tensors
from share_compute_actors.transport.envelope import WireLabel

__all__ = ["follow"]

LOCAL: dict[str, Any] = {
    "synchronization": {"kind": "local", "branches": 2, "every": 2},
    "compression": {"name": "int8"},
}


def a_branch(**options: Any) -> Trainer:
    return Trainer(version=0, **{**LOCAL, **options})


class LockedTrainer(Trainer):
    """A branch whose shard is cloned only between steps and merges, as on a member's compute thread."""

    def __init__(self) -> None:
        super().__init__(version=0, **LOCAL)
        self.lock = threading.Lock()
        self.copier = Copier(self.run, lambda: (self.runner, self.step))

    def run(self, work: Callable[[], Any]) -> Any:
        with self.lock:
            return work()


def update_of(trainer: Trainer, version: int) -> dict[str, Tensor]:
    """Return an update that merges the contribution of this branch alone, with half of its change."""
    branch, codec = trainer.runner.branch, codec_of_round(trainer.training, version)
    assert branch is not None
    update: dict[str, Tensor] = {}
    for name, payload in branch.contribution().items():
        change = codec.decode(payload, trainer.runner.parameters[name].shape) / 2
        both = codec_of_update(trainer.training, version)
        update[name] = both.encode(change, both.begin(name, change.shape))[0]
    return update


def merge(trainer: Trainer, version: int) -> None:
    trainer.runner.merge(version, version - 1, update_of(trainer, version), closes_round=True)


def cells(runner: Runner, step: int, samples: Tensor, targets: Tensor) -> None:
    """Take a step with one microbatch for each 4 samples."""
    for microbatch in range(len(samples) // 4):
        part = slice(4 * microbatch, 4 * microbatch + 4)
        runner.forward(step, microbatch, samples[part])
        runner.backward(microbatch, targets[part])
    runner.reduce([])
    runner.apply(step, 1.0)


def test_one_step_in_a_round_is_a_step_with_the_samples_of_all_branches() -> None:
    options: dict[str, Any] = {
        "synchronization": {"kind": "local", "branches": 2, "every": 1},
        "compression": {"name": "none"},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
    branches = [a_branch(**options).runner for _ in range(2)]
    plain = Trainer(**options)
    whole = Runner(plain.runner.stage, plain.training, SummationTree((2,)))
    codec, source = codec_of_round(plain.training, 1), torch.Generator().manual_seed(0)
    begun = {name: parameter.detach().clone() for name, parameter in whole.parameters.items()}
    for step in range(1, 9):
        samples, targets = torch.rand(8, 13, generator=source), torch.randint(0, 5, (8,), generator=source)
        cells(whole, step, samples, targets)
        given = []
        for number, runner in enumerate(branches):
            part = slice(4 * number, 4 * number + 4)
            cells(runner, step, samples[part], targets[part])
            assert runner.branch is not None
            given.append(runner.branch.contribution())
        update = {}
        for name, parameter in whole.parameters.items():
            first, second = (codec.decode(each[name], parameter.shape) for each in given)
            update[name] = codec.encode((first + second) / 2, {})[0]
        for runner in branches:
            runner.merge(step, step - 1, update, closes_round=True)
            for name, parameter in runner.parameters.items():
                assert torch.allclose(parameter, whole.parameters[name], rtol=0, atol=1e-6)
    assert all(
        not torch.allclose(parameter, begun[name], atol=1e-3) for name, parameter in whole.parameters.items()
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_branch_that_was_loaded_goes_on_with_the_same_bits(optimizer: dict[str, Any]) -> None:
    first, second = a_branch(optimizer=optimizer), a_branch(optimizer=optimizer)
    for version in (1, 2):
        first.take_step()
        state = {name: tensor.detach().clone() for name, tensor in first.state().items()}
        with torch.no_grad():
            for name, tensor in second.runner.stage.persistent().items():
                tensor.copy_(state[name])
        slots = {name: tensor for name, tensor in state.items() if "::" in name}
        assert second.runner.optimizer is not None
        assert second.runner.branch is not None
        second.runner.optimizer.state.clear()
        restore_optimizer(second.runner.optimizer, second.runner.parameters, slots)
        second.runner.branch.restore({name: each for name, each in slots.items() if "::branch." in name})
        second.step = first.step
        for trainer in (first, second):
            trainer.take_step()
            merge(trainer, version)
        assert first.state().keys() == second.state().keys()
        assert all(torch.equal(tensor, second.state()[name]) for name, tensor in first.state().items())


@pytest.mark.parametrize("inner_state", ["keep", "reset"])
def test_the_inner_optimizer_is_kept_or_reset(inner_state: str) -> None:
    trainer = a_branch(synchronization={**LOCAL["synchronization"], "inner_state": inner_state})
    trainer.take_step()
    before = {name for name in trainer.runner.state_tensors() if "::branch." not in name}
    assert before
    update = update_of(trainer, 1)
    trainer.runner.merge(1, 0, update, closes_round=True)
    after = {name for name in trainer.runner.state_tensors() if "::branch." not in name}
    assert after == (before if inner_state == "keep" else set())
    trainer.take_step()
    trainer.runner.merge(1, 0, update, closes_round=True)  # a repetition resets nothing
    trainer.runner.merge(2, 1, update, closes_round=False)
    assert {name for name in trainer.runner.state_tensors() if "::branch." not in name} == before


def test_a_step_after_a_contribution_changes_the_contribution() -> None:
    once, twice = a_branch(), a_branch()
    for trainer in (once, twice):
        trainer.take_step()
    assert twice.runner.branch is not None
    twice.runner.branch.contribution()
    for trainer in (once, twice):
        trainer.take_step()
    update = update_of(once, 1)
    for trainer in (once, twice):
        trainer.runner.merge(1, 0, update, closes_round=True)
    assert all(torch.equal(tensor, twice.state()[name]) for name, tensor in once.state().items())


def test_frozen_parameters_are_no_part_of_a_contribution() -> None:
    trainer = a_branch(freeze=("layers[:2]",))
    trained = {name for name, each in trainer.runner.parameters.items() if each.requires_grad}
    assert trained
    assert trained < trainer.runner.parameters.keys()
    trainer.take_step()
    assert folder_tensors(trainer.runner, None, "contribution")["model"].keys() == trained
    untrained = a_branch(shard=ShardPart(2, 3))
    assert folder_tensors(untrained.runner, None, "contribution") == {"model": {}}
    untrained.runner.merge(1, 0, {}, closes_round=True)


# -- backup copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_copy_has_the_state_of_the_branch(
    optimizer: dict[str, Any], follow: Callable[..., Follower]
) -> None:
    trainer = a_branch(optimizer=optimizer)
    follower = fetched(follow(trainer), trainer)  # before the optimizer has state
    for _ in range(2):
        trainer.take_step(follower)
    assert follower.bring_to(2, trainer.scales)
    assert same(follower, trainer)


@pytest.fixture
def copies() -> Iterator[tuple[LockedTrainer, Copies]]:
    """Return a branch, and the copies of a member that follows it; both are in one process."""
    failures: list[ShareComputeError] = []
    trainer = LockedTrainer()
    kept = Copies("bob", trainer.training, CPU, failures.append, CopyQuota(), reach=directly)
    kept.keep(1, 0, {0: Followed("ann", trainer.copier, WHOLE)})
    yield trainer, kept
    kept.keep(2, 0, {})
    assert not failures


def whole(copies: Copies) -> Follower:
    """Wait until the copy is whole."""
    copy = copies.of(WHOLE)
    assert copy is not None
    wait_for(lambda: copy.is_whole, "the whole copy")
    return copy


def step_of(trainer: LockedTrainer, copies: Copies) -> None:
    """Take a step whose gradient the copies get."""
    trainer.run(lambda: _step_of(trainer, copies))


def _step_of(trainer: LockedTrainer, copies: Copies) -> None:
    trainer.prepare()
    runner, number = trainer.runner, trainer.step + 1
    sent = gradient_messages(runner.gradients, runner.loss_scale, *runner.update_of(trainer.step))
    for place, tensor in sent:
        copies.take(WireLabel("train", number, "log", place, 0), tensor.clone())
    trainer.step = number
    trainer.scales[number] = 1.0
    runner.apply(number, 1.0)


def test_copies_that_restart_after_a_merge_have_the_bits_of_their_primary(
    copies: tuple[LockedTrainer, Copies],
) -> None:
    trainer, kept = copies
    for version in (1, 2):
        before = whole(kept)
        step_of(trainer, kept)
        step_of(trainer, kept)
        kept.outdate(trainer.step)
        trainer.run(partial(merge, trainer, version))
        kept.restart()
        assert kept.of(WHOLE) is not before
        for _ in range(2 * version):
            step_of(trainer, kept)
        copy = whole(kept)
        assert copy.bring_to(trainer.step, trainer.scales)
        assert same(copy, trainer)


def test_copies_from_before_a_merge_serve_a_repeated_merge(copies: tuple[LockedTrainer, Copies]) -> None:
    trainer, kept = copies
    copy = whole(kept)
    step_of(trainer, kept)
    state = {name: tensor.detach().clone() for name, tensor in trainer.state().items()}
    kept.outdate(trainer.step)
    trainer.run(lambda: merge(trainer, 1))
    assert kept.of(WHOLE) is copy
    assert copy.bring_to(1, trainer.scales)
    assert all(torch.equal(copy.rows(name, 0, None), tensor) for name, tensor in state.items())


def test_the_first_gradient_after_a_merge_restarts_copies_that_are_outdated(
    copies: tuple[LockedTrainer, Copies],
) -> None:
    trainer, kept = copies
    before = whole(kept)
    step_of(trainer, kept)
    kept.outdate(trainer.step)
    trainer.run(lambda: merge(trainer, 1))
    step_of(trainer, kept)
    assert kept.of(WHOLE) is not before
    step_of(trainer, kept)
    copy = whole(kept)
    assert copy.bring_to(trainer.step, trainer.scales)
    assert same(copy, trainer)


def test_a_copy_waits_until_the_space_of_the_copy_before_is_free() -> None:
    trainer, calls = a_branch(), list[str]()

    class Recorded(CopyQuota):
        def give_back(self, size: int) -> None:
            calls.append("released")
            super().give_back(size)

        def require(self, size: int) -> None:
            if size > 10_000:
                calls.append("required")
            super().require(size)

    failures: list[ShareComputeError] = []
    kept = Copies("bob", trainer.training, CPU, failures.append, Recorded(), reach=directly)
    kept.keep(1, 0, {0: Followed("ann", trainer.copier, WHOLE)})
    whole(kept)
    calls.clear()
    kept.restart()
    whole(kept)
    assert calls[0] == "released"
    assert "required" in calls
    kept.keep(2, 0, {})
    assert not failures


def test_the_space_of_a_copy_includes_the_state_of_the_branch() -> None:
    plain, branch = Trainer(), a_branch()
    outline = branch.copier.outline(WHOLE)
    trained = sum(parameter.numel() for parameter in branch.runner.parameters.values())
    sizes = [outline.copy_bytes(each.training.state_tensors) for each in (plain, branch)]
    assert sizes[1] - sizes[0] == 2 * 4 * trained
