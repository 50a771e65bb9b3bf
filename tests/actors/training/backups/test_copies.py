"""Gradients on their way to backups, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.actors.training.backups.test_followers import CPU, WHOLE, Trainer, adopted, same
from tests.actors.transport.test_channel import ANN, BOB, Pair, pair
from tests.conftest import wait_for

from share_compute.errors import ShareComputeError
from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.member_events import Log
from share_compute.protocol.points import Point
from share_compute_actors.messages import Followed
from share_compute_actors.testing.fault_injection import FaultInjector
from share_compute_actors.testing.faulty_training import FaultyOutbox
from share_compute_actors.training.backups.copies import Copies
from share_compute_actors.training.backups.copy_quota import CopyQuota
from share_compute_actors.transport.channel import Channel
from share_compute_actors.transport.envelope import WireLabel

__all__ = ["pair"]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def quota() -> CopyQuota:
    return CopyQuota()


@pytest.fixture
def copies(trainer: Trainer, quota: CopyQuota) -> Iterator[Copies]:
    """Return the copies of a machine that follows the trainer; primary and backup are in one process."""
    failures: list[ShareComputeError] = []
    kept = Copies("bob", trainer.training, CPU, failures.append, quota, reach=directly)
    keep(kept, trainer, 0)
    yield kept
    kept.keep(1, 0, {})
    assert not failures


def directly(owner: Any, _backup: str, _stopping: object) -> Any:
    """Call a primary in the same process."""
    return owner


def keep(copies: Copies, trainer: Trainer, committed: int, owner: str = ANN) -> None:
    copies.keep(1, committed, {0: Followed(owner, trainer.copier, WHOLE)})
    wait_for(lambda: copies.of(WHOLE).is_whole, "the whole copy")  # type: ignore[union-attr]


def outbox(*failures: InjectedFailure) -> FaultyOutbox:
    return FaultyOutbox(FaultInjector(failures, ANN), lambda: 1)


def taken(copies: Copies, channel: Channel) -> WireLabel:
    """Receive messages until a gradient is complete; return its last label."""
    for _ in range(10):
        came = channel.take(5.0)  # None: the message was dropped
        if came is not None and copies.take(came[0], came[2]) is not None:
            return came[0]
    raise AssertionError("the gradient did not come")


@pytest.mark.parametrize("kind", [None, FailureKind.duplicate])
def test_a_gradient_travels_and_its_owner_is_notified(
    pair: Pair, trainer: Trainer, copies: Copies, kind: FailureKind | None
) -> None:
    ann, bob = pair()
    sending = outbox(*([InjectedFailure(kind, Point.log_sending)] if kind else []))
    trainer.prepare()
    sending.give(ann, Log(1, BOB, 0), 0, trainer.runner)
    sending.give(ann, Log(1, BOB, 0), 0, trainer.runner)
    label = taken(copies, bob)
    outbox().acknowledge(bob, Followed(ANN, None, WHOLE), label)
    ann.receive(WireLabel("train", 1, "logged", 0, 0), "bob", 5.0)
    assert bob.take(0.0) is None, "it was sent twice"
    trainer.runner.apply(1, 0.5)
    copy = copies.of(WHOLE)
    assert copy is not None
    assert copy.bring_to(1, {1: 0.5})
    assert same(copy, trainer)


def test_in_another_epoch_it_is_given_again_and_its_owner_is_notified_again(
    pair: Pair, trainer: Trainer, copies: Copies
) -> None:
    sending = outbox()
    trainer.prepare()
    for epoch in (1, 2):
        ann, bob = pair(epoch, epoch)
        copy = copies.of(WHOLE)
        keep(copies, trainer, 0)
        assert copies.of(WHOLE) is copy
        sending.give(ann, Log(1, BOB, 0), 0, trainer.runner)
        taken(copies, bob)


def test_a_copy_that_missed_a_step_is_begun_anew(trainer: Trainer, copies: Copies) -> None:
    before = copies.of(WHOLE)
    trainer.take_step()
    keep(copies, trainer, 1)
    copy = copies.of(WHOLE)
    assert copy is not None
    assert copy is not before
    assert copy.bring_to(1, {})
    assert same(copy, trainer)


def test_a_copy_is_begun_anew_when_another_machine_goes_on_with_the_shard(
    trainer: Trainer, copies: Copies, quota: CopyQuota
) -> None:
    first = copies.of(WHOLE)
    trainer.take_step(first)
    eve = adopted(trainer, WHOLE)  # it does not know the last update factor
    keep(copies, eve, 1, "eve")
    second = copies.of(WHOLE)
    assert second is not None
    assert second is not first
    most_bytes = (3 + 20) * eve.gradient_bytes  # the snapshot with the state of Adam, and 20 gradients
    for _ in range(40):
        eve.take_step(second)
        wait_for(lambda: quota.taken_bytes <= most_bytes, "gradients to be used up")
    assert second.bring_to(eve.step, eve.scales)
    assert same(second, eve)
    keep(copies, eve, eve.step, "bob")
    assert copies.of(WHOLE) is second, "it is where they are"


def test_what_is_not_wanted_any_more_is_forgotten(copies: Copies) -> None:
    copies.keep(1, 0, {})
    assert copies.of(WHOLE) is None
