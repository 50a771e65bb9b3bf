"""Members with shares of the optimizer's state compute the bits of a member that has all of it; without Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.actors.training.member.sharing import CPU, SharingStage
from torch import Tensor

from share_compute.specification import OptimizerName
from share_compute.training.shares import owners
from share_compute_actors.training.backups.copy_quota import CopyQuota
from share_compute_actors.training.backups.copying import Copier
from share_compute_actors.training.backups.followers import Follower
from share_compute_actors.training.backups.logs import gradient_messages
from share_compute_actors.training.member.saving import folder_tensors

SMALL = {
    "allgather": {"mode": "size", "bucket_bytes": 2000},
    "reducescatter": {"mode": "index", "cuts": [1, 3]},
}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two states have the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("name", list(OptimizerName))
def test_weights_and_state_are_those_without_shares(members: int, name: OptimizerName) -> None:
    training: dict[str, Any] = {"optimizer": {"name": name, "weight_decay": 0.1, "l1": 1e-3}}
    shared = SharingStage(members, {**training, "communication_fusion": SMALL})
    whole = SharingStage(1, training)
    for scale in (1.0, 0.25, 0.5):
        for stage in (shared, whole):
            stage.prepare()
        assert shared.norms() == whole.norms()  # so the factor of a clipped gradient is the same
        for stage in (shared, whole):
            stage.update(scale)
            stage.gather()
    for runner in shared.runners:
        assert same(runner.stage.persistent(), whole.runners[0].stage.persistent())
    assert same(shared.state(), whole.state())


def test_an_exchange_of_weights_may_be_repeated_while_graphs_hold_them() -> None:
    stage = SharingStage(2, {})
    stage.take_step()
    first = stage.runners[0]
    first.forward(2, 0, torch.rand(4, 13))
    stage.gather()
    first.backward(0, torch.zeros(4, dtype=torch.long))


def test_a_failed_exchange_is_made_good_by_the_next_one() -> None:
    stage, whole = SharingStage(3, {}), SharingStage(1, {})
    for each in (stage, whole):
        each.prepare()
        each.update(1.0)
    assert not same(stage.runners[0].stage.persistent(), whole.runners[0].stage.persistent())
    stage.gather()
    stage.gather()
    for runner in stage.runners:
        assert same(runner.stage.persistent(), whole.runners[0].stage.persistent())


def test_a_copy_of_a_share_has_what_its_owner_had() -> None:
    stage = SharingStage(2, {"optimizer": {"name": "adamw"}})
    owner = stage.runners[1]
    copier = Copier(lambda work: work(), lambda: (owner, stage.step))
    stage.take_step()
    failures: list[Exception] = []
    follower = Follower(owner.part, stage.training, CPU, failures.append, CopyQuota())
    fetching = follower.follow("owner", lambda _: copier)
    assert fetching is not None
    fetching.result()
    scales = {}
    for scale in (0.5, 1.0):
        stage.prepare()
        sent = gradient_messages(owner.gradients, owner.loss_scale, *owner.update_of(stage.step))
        for place, tensor in sent:
            assert follower.misfit(place, tensor) is None
            follower.take(stage.step + 1, place, tensor.clone())
        scales[stage.step + 1] = scale
        stage.update(scale)
        stage.gather()
    assert follower.bring_to(stage.step, scales)
    assert set(follower.inventory()) == owner.gradients.own_names
    state = owner.stage.persistent() | owner.state_tensors()
    names = {*follower.inventory(), *follower.optimizer_shapes()}
    assert names == owner.gradients.own_names | owner.state_tensors().keys()
    for name in names:
        assert torch.equal(follower.rows(name, 0, None).view(-1), state[name].view(-1))
    follower.close()
    assert not failures


def test_a_checkpoint_has_each_tensor_once_whatever_the_shares() -> None:
    stage, whole = SharingStage(3, {}), SharingStage(1, {})
    for each in (stage, whole):
        each.take_step()
    (wanted,) = (folder_tensors(runner, None, "checkpoint") for runner in whole.runners)
    parts = [folder_tensors(runner, None, "checkpoint") for runner in stage.runners]
    assert [sorted(part) for part in parts] == [["model", "optimizer"], ["optimizer"], ["optimizer"]]
    assert same(parts[0]["model"], wanted["model"])
    assert same(
        {name: tensor for part in parts for name, tensor in part["optimizer"].items()}, wanted["optimizer"]
    )


def test_shares_are_as_equal_as_whole_parameters_allow() -> None:
    sizes = {"table": 100, "a": 50, "b": 50, "c": 30, "d": 30, "e": 30}
    assert owners(sizes, 3) == {"table": 0, "a": 1, "b": 2, "c": 1, "d": 2, "e": 1}
    assert owners(sizes, 1) == dict.fromkeys(sizes, 0)
    assert owners(sizes, 2, first=("e",))["e"] == 0
    assert set(owners({"a": 1}, 4).values()) == {0}
