"""Copies of other members' shards: brought to any committed step, they have the primary's bits."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.conftest import wait_for
from torch import Tensor

from share_compute.errors import ContributorLost, ShareComputeError, StaleEpoch, VerificationFailed
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.storage.slots import parameter_of
from share_compute.protocol.membership import ShardPart
from share_compute.protocol.tree import SummationTree
from share_compute.shards import Shard
from share_compute.specification import LayerSpec, OptimizerName, TrainingSpec
from share_compute.topology import Contributor, Device, Link, Topology
from share_compute.training.loss_scale import SKIPPED
from share_compute.training.optimizers import restore_optimizer
from share_compute_actors.training.backups.copy_quota import CopyQuota
from share_compute_actors.training.backups.copying import Copied, Copier, Legacy, ShardOutline
from share_compute_actors.training.backups.followers import Follower
from share_compute_actors.training.backups.logs import gradient_messages
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.membership.backups import backups_of
from share_compute_actors.transport.pieces import Piece

CPU = torch.device("cpu")
WHOLE = ShardPart(0, 4)
LAYERS = (
    LayerSpec(type="linear", options={"in_features": 13, "out_features": 37}),
    LayerSpec(type="layer_norm", options={"normalized_shape": 37}),
    LayerSpec(type="gelu"),
    LayerSpec(type="linear", options={"in_features": 37, "out_features": 5}),
)
WITH_STATISTICS = (
    LAYERS[0],
    LayerSpec(type="batch_norm1d", options={"num_features": 37}),
    *LAYERS[2:],
)


class Trainer:
    """A primary that trains alone and sends its gradients to its backup."""

    def __init__(
        self,
        *,
        freeze: tuple[str, ...] = (),
        shard: ShardPart = WHOLE,
        version: int | None = None,
        layers: tuple[LayerSpec, ...] = LAYERS,
        **training: Any,
    ) -> None:
        self.shard = shard
        self.training = TrainingSpec.model_validate(
            {"steps": 40, "batch_size": 4, "microbatches": 1, **training}
        )
        blueprint = Blueprint(layers=layers, freeze=freeze)
        stage = build_stage(blueprint, Shard("m", shard.start, shard.stop, WHOLE.stop), CPU)
        stage.initialize(3)
        self.runner = Runner(stage, self.training, SummationTree((1,)))
        if version is not None:
            self.runner.begin_branch(version)
        self.step = 0
        self.scales: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        self.let_copy(Copier)

    def let_copy(self, kind: type[Copier]) -> None:
        """Let its shard be copied by this kind of copier."""
        self.copier = kind(lambda work: work(), lambda: (self.runner, self.step))

    def prepare(self, follower: Follower | None = None) -> None:
        """Compute the gradient of the next step, and send it."""
        step, source = self.step + 1, torch.Generator().manual_seed(self.step)
        samples = torch.rand(4, 13 if self.shard[0] == 0 else 37, generator=source)
        self.runner.forward(step, 0, samples)
        is_last = self.shard[1] == WHOLE[1]
        self.runner.backward(
            0, torch.randint(0, 5, (4,), generator=source) if is_last else torch.zeros(4, 37)
        )
        self.runner.reduce([])
        if follower is not None:
            sent = gradient_messages(
                self.runner.gradients, self.runner.loss_scale, *self.runner.update_of(self.step)
            )
            for place, tensor in [*sent, *sent]:
                follower.take(step, place, tensor.clone())

    def take_step(
        self, follower: Follower | None = None, scale: float = 1.0, rate: float | None = None
    ) -> None:
        self.prepare(follower)
        self.step += 1
        self.scales[self.step] = scale
        if rate is not None:
            self.rates[self.step] = rate
        self.runner.apply(self.step, scale, rate)

    @property
    def gradient_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.runner.parameters.values())

    def state(self) -> dict[str, Tensor]:
        return self.runner.stage.persistent() | self.runner.state_tensors()


@pytest.fixture
def follow() -> Iterator[Callable[..., Follower]]:
    """Return a function that makes a copy, which is closed at the end; errors of its thread are raised then."""
    made: list[Follower] = []
    failures: list[Exception] = []

    def make(trainer: Trainer, quota: CopyQuota | None = None, **options: int) -> Follower:
        quota = quota or CopyQuota()
        made.append(Follower(trainer.shard, trainer.training, CPU, failures.append, quota, **options))
        return made[-1]

    yield make
    for follower in made:
        follower.close()
    for failure in failures:
        raise failure


def fetched(follower: Follower, trainer: Trainer) -> Follower:
    """Wait until the snapshot is complete."""
    fetching = follower.follow("owner", lambda _: trainer.copier)
    assert fetching is not None
    fetching.result()
    assert follower.is_whole
    return follower


def same(follower: Follower, trainer: Trainer) -> bool:
    state = trainer.state()
    names = {*follower.inventory(), *follower.optimizer_shapes()}
    return names == state.keys() and all(
        torch.equal(follower.rows(name, 0, None), tensor.detach()) for name, tensor in state.items()
    )


OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{
        name.value: {"name": name.value, "learning_rate": 0.01, "weight_decay": 0.1} for name in OptimizerName
    },
    "adamw, all decay": {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "decays": "all"},
    "rmsprop with momentum": {"name": "rmsprop", "learning_rate": 0.01, "momentum": 0.9},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 3])
def test_has_the_bits_of_its_owner(
    optimizer: dict[str, Any], before: int, follow: Callable[..., Follower]
) -> None:
    trainer = Trainer(optimizer=optimizer, schedule={"name": "linear", "warmup_steps": 2})
    for _ in range(before):
        trainer.take_step()
    follower = fetched(follow(trainer), trainer)
    for scale in (1.0, 0.37, SKIPPED, 0.9):
        trainer.take_step(follower, scale)
    assert follower.bring_to(trainer.step, trainer.scales)
    assert same(follower, trainer)
    assert follower.loss_scale() == trainer.runner.loss_scale


def test_loss_scales_count(follow: Callable[..., Follower]) -> None:
    trainer = Trainer(precision="float16")
    assert trainer.runner.loss_scale.factor > 1
    follower = fetched(follow(trainer), trainer)
    for scale in (SKIPPED, 0.5, SKIPPED, 0.8):
        trainer.take_step(follower, scale)
    assert follower.bring_to(4, trainer.scales)
    assert same(follower, trainer)
    assert follower.loss_scale() == trainer.runner.loss_scale


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_running_statistics_are_brought_to_the_step(precision: str, follow: Callable[..., Follower]) -> None:
    trainer = Trainer(layers=WITH_STATISTICS, precision=precision, optimizer={"weight_decay": 0.1})
    trainer.take_step()
    follower = fetched(follow(trainer), trainer)
    before = trainer.state()["layers.1.running_var"].clone()
    for scale in (1.0, 0.37, SKIPPED, 0.9):
        trainer.take_step(follower, scale)
    assert not torch.equal(trainer.state()["layers.1.running_var"], before)
    assert follower.bring_to(trainer.step, trainer.scales)
    assert same(follower, trainer)


def test_statistics_are_neither_clipped_nor_trained() -> None:
    runs = [Trainer(layers=WITH_STATISTICS, optimizer={"name": "sgd"}) for _ in range(2)]
    for trainer, scale in zip(runs, (1.0, 0.01), strict=True):
        trainer.prepare()
        assert not any("running" in name for name in trainer.runner.squared_norms())
        trainer.runner.apply(1, scale)
    one, other = (trainer.state() for trainer in runs)
    assert all(torch.equal(one[name], other[name]) for name in one if "running" in name)
    assert not any(torch.equal(one[name], other[name]) for name in one if name.endswith("weight"))


@pytest.mark.parametrize("shard", [WHOLE, ShardPart(0, 2)])
def test_what_is_frozen_is_there_too(shard: ShardPart, follow: Callable[..., Follower]) -> None:
    trainer = Trainer(freeze=("layers[:2]",), shard=shard)
    follower = fetched(follow(trainer), trainer)
    for _ in range(3):
        trainer.take_step(follower)
    assert follower.bring_to(3, trainer.scales)
    assert same(follower, trainer)


def test_learning_rates_that_followed_from_validations_are_repeated(follow: Callable[..., Follower]) -> None:
    trainer = Trainer()
    follower = fetched(follow(trainer), trainer)
    rates = [1e-2] * 10 + [3e-3] * 10 + [1e-3] * 3
    for rate in rates:
        trainer.take_step(follower, rate=rate)
    assert trainer.rates == dict(enumerate(rates, start=1))
    assert follower.bring_to(trainer.step, trainer.scales, trainer.rates)
    assert same(follower, trainer)


@pytest.mark.parametrize("scales", [(1.0, SKIPPED, 0.5), (SKIPPED,) * 20])
def test_a_shard_without_parameters_has_its_step_and_loss_scale(
    scales: tuple[float, ...], follow: Callable[..., Follower]
) -> None:
    """A stage may be an activation alone. Its next holder needs no weights, but must know that none are missing."""
    trainer = Trainer(shard=ShardPart(2, 3), precision="float16")
    trainer.take_step()
    follower = fetched(follow(trainer), trainer)
    assert follower.is_whole
    for scale in scales:
        trainer.take_step(follower, scale)
    assert follower.reaches(trainer.step)
    assert not follower.reaches(trainer.step + 1)
    assert follower.bring_to(trainer.step, trainer.scales)
    assert same(follower, trainer)
    assert follower.loss_scale() == trainer.runner.loss_scale
    legacy = follower.legacy(trainer.step)
    assert legacy is not None
    heir = follow(trainer)
    heir.inherit(trainer.copier.outline(ShardPart(2, 3)), [legacy]).result()
    trainer.take_step(heir)
    assert heir.bring_to(trainer.step, trainer.scales)
    assert heir.loss_scale() == trainer.runner.loss_scale


class DeadOwner:
    """A primary that died before its first call."""

    def outline(self, *_: Any) -> Any:
        raise ContributorLost("it is dead", hint="")

    def copy(self, *_: Any) -> Any:
        raise ContributorLost("it is dead", hint="")

    def piece(self, *_: Any) -> Any:
        raise ContributorLost("it is dead", hint="")


def test_a_copy_from_local_data_outlives_its_primary(follow: Callable[..., Follower]) -> None:
    """The primary may die while the data is copied, before its first call."""
    trainer, may_copy = Trainer(), threading.Event()
    trainer.take_step()
    legacy = fetched(follow(trainer), trainer).legacy(trainer.step)
    assert legacy is not None

    def later(name: str) -> Any:
        assert may_copy.wait(60.0)
        return legacy.state(name)

    heir = follow(trainer)
    heir.inherit(trainer.copier.outline(trainer.shard), [legacy._replace(state=later)])
    fetching = heir.follow("owner", lambda _: DeadOwner())
    may_copy.set()
    assert fetching is not None
    fetching.result()
    assert heir.is_whole
    assert same(heir, trainer)


def test_a_primary_that_dies_after_its_last_piece_leaves_a_whole_copy(
    follow: Callable[..., Follower],
) -> None:
    trainer = Trainer()

    class Dying(Copier):
        def copy(self, shard: ShardPart, names: Any) -> Copied:
            if not names:
                raise ContributorLost("it is dead", hint="")
            return super().copy(shard, names)

    trainer.let_copy(Dying)
    assert same(fetched(follow(trainer), trainer), trainer)


def test_steps_are_taken_while_it_is_fetched(follow: Callable[..., Follower]) -> None:
    """Each parameter is fetched after another step, and is brought forward from that step."""
    trainer = Trainer()

    class Training(Copier):
        """A primary that takes a step whenever a copy was staged."""

        def copy(self, shard: ShardPart, names: Any) -> Copied:
            copied = super().copy(shard, names)
            if names:
                trainer.take_step(follower, 0.5)
            return copied

    follower = follow(trainer, batch_bytes=1)
    trainer.let_copy(Training)
    fetched(follower, trainer)
    assert trainer.step == len(trainer.runner.stage.persistent())
    assert follower.bring_to(trainer.step, trainer.scales)
    assert same(follower, trainer)


def test_gradients_are_used_up(follow: Callable[..., Follower]) -> None:
    """Gradients of many steps take little space too, and the copy still has the primary's bits."""
    trainer, quota = Trainer(), CopyQuota()
    follower = fetched(follow(trainer, quota), trainer)
    most_bytes = (3 + 10) * trainer.gradient_bytes  # the snapshot with the state of Adam, and ten gradients
    for _ in range(30):
        trainer.take_step(follower, 0.7)
        wait_for(lambda: quota.taken_bytes < most_bytes, "gradients to be used up")
    assert follower.bring_to(30, trainer.scales)
    assert same(follower, trainer)
    trainer.take_step(follower, 0.7)
    assert follower.bring_to(31, trainer.scales)
    assert same(follower, trainer)


def test_little_is_left_for_the_pause(follow: Callable[..., Follower]) -> None:
    trainer, quota = Trainer(), CopyQuota()
    follower = follow(trainer, quota)
    assert not follower.catch_up(), "nothing is there yet"
    fetched(follower, trainer)
    for _ in range(5):
        trainer.take_step(follower, 0.7)
    wait_for(follower.catch_up, "the copy to apply its gradients")
    pending_bytes = quota.taken_bytes
    assert follower.bring_to(5, trainer.scales)
    # How the last step was committed is reported with the next one, so its gradient was left.
    assert pending_bytes - quota.taken_bytes == trainer.gradient_bytes
    assert same(follower, trainer)


def test_an_open_step_stays_open(follow: Callable[..., Follower]) -> None:
    trainer = Trainer()
    follower = fetched(follow(trainer), trainer)
    trainer.take_step(follower)
    trainer.prepare(follower)
    assert follower.bring_to(1, trainer.scales)
    assert same(follower, trainer)
    trainer.runner.apply(2, 0.5)
    assert follower.bring_to(2, {1: 1.0, 2: 0.5})
    trainer.step = 2
    assert same(follower, trainer)


def test_says_when_something_is_missing(follow: Callable[..., Follower]) -> None:
    trainer = Trainer()
    follower = follow(trainer)
    assert not follower.bring_to(0, {})
    fetched(follower, trainer)
    trainer.take_step(follower)
    trainer.take_step()  # the copy is not notified
    trainer.take_step(follower)
    assert follower.reaches(1)
    assert not follower.reaches(2)
    assert not follower.bring_to(3, trainer.scales)
    assert not follower.bring_to(1, {})
    assert follower.bring_to(1, trainer.scales)


def open_files() -> set[int]:
    """Return the descriptors of all files without a name that this process has open."""
    found = set[int]()
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - their names are numbers
        with suppress(OSError):  # the listing had a descriptor of its own
            status = os.fstat(int(name))
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                found.add(int(name))
    return found


def test_a_damaged_gradient_is_noticed_and_reported() -> None:
    trainer, reported = Trainer(), []
    follower = fetched(Follower(WHOLE, trainer.training, CPU, reported.append, CopyQuota()), trainer)
    before = open_files()
    trainer.take_step(follower)
    (gradient,) = open_files() - before
    assert os.pwrite(gradient, b"\x01\x02\x03", 40) == 3
    assert not follower.bring_to(1, trainer.scales)
    assert not follower.is_whole
    assert not follower.reaches(1)
    follower.close()
    (failure,) = reported
    assert isinstance(failure, VerificationFailed)


def test_an_owner_may_begin_anew_amid_a_piece(follow: Callable[..., Follower]) -> None:
    trainer = Trainer()

    class Restless(Copier):
        """A primary whose runner is replaced while its shard is fetched."""

        num_calls = 0

        def piece(self, ticket: int, name: str, start: int, stop: int) -> Piece:
            self.num_calls += 1
            if self.num_calls == 3:
                self.forget()
            return super().piece(ticket, name, start, stop)

    trainer.let_copy(Restless)
    assert same(fetched(follow(trainer), trainer), trainer)


def test_damaged_pieces_are_requested_again(follow: Callable[..., Follower]) -> None:
    trainer = Trainer()

    class Noisy(Copier):
        """A primary behind a bad network."""

        num_calls = 0

        def piece(self, ticket: int, name: str, start: int, stop: int) -> Piece:
            self.num_calls += 1
            piece = super().piece(ticket, name, start, stop)
            content = piece.content.copy()
            content[0] ^= self.num_calls % 2
            return piece._replace(content=content)

    trainer.let_copy(Noisy)
    follower = fetched(follow(trainer), trainer)
    assert same(follower, trainer)


def test_a_primary_without_the_shard_is_called_again(follow: Callable[..., Follower]) -> None:
    trainer = Trainer()

    class Late(Copier):
        """A primary that has not loaded its shard yet."""

        num_calls = 0

        def outline(self, shard: ShardPart) -> ShardOutline:
            self.num_calls += 1
            if self.num_calls == 1:
                raise StaleEpoch("this member does not hold the shard any more", hint="no action needed")
            return super().outline(shard)

    trainer.let_copy(Late)
    assert same(fetched(follow(trainer), trainer), trainer)


def test_another_owner_goes_on_where_one_was_lost(follow: Callable[..., Follower]) -> None:
    trainer = Trainer()
    is_unresponsive = threading.Event()
    num_calls: list[str] = []

    class Mortal(Copier):
        """A primary that becomes unresponsive after some parameters."""

        def copy(self, shard: ShardPart, names: Any) -> Copied:
            num_calls.extend(names)
            if len(num_calls) == 3:
                is_unresponsive.set()
                assert ended.wait(60.0)
                raise StaleEpoch("the copy was cancelled", hint="no action needed")
            return super().copy(shard, names)

    lost = Mortal(lambda work: work(), lambda: (trainer.runner, trainer.step))
    follower = follow(trainer, batch_bytes=1)
    ended = threading.Event()

    def reach(stopping: threading.Event) -> Copier:
        nonlocal ended
        ended = stopping
        return lost

    follower.follow("one", reach)
    assert is_unresponsive.wait(60.0)
    trainer.take_step(follower)
    assert not same(fetched(follower, trainer), trainer)
    assert follower.bring_to(1, trainer.scales)
    assert same(follower, trainer)
    assert len(num_calls) == 3


def test_buffers_must_not_change(follow: Callable[..., Follower]) -> None:
    trainer = Trainer()
    trainer.runner.stage.module.register_buffer("seen", torch.zeros(1))
    fetched(follow(trainer), trainer)
    trainer.copier.require_still()
    trainer.runner.stage.module.seen.add_(1)
    with pytest.raises(ShareComputeError, match="seen changes during training"):
        trainer.copier.require_still()


def test_others_may_not_read_earlier_staged_copies() -> None:
    trainer = Trainer()
    copied = trainer.copier.copy(WHOLE, ["layers.0.bias"])
    trainer.copier.copy(WHOLE, ["layers.0.bias"])
    with pytest.raises(StaleEpoch):
        trainer.copier.piece(copied.ticket, "layers.0.bias", 0, 4)


# -- primaries of copies -----------------------------------------------------------------------------------------------


def machine(name: str, kind: Any = "cpu", memory_bytes: int = 2**30) -> Contributor:
    return Contributor(name, name, (Device(kind, name, memory_bytes),))


def test_several_may_copy_the_same_shard_at_once() -> None:
    trainer = Trainer()
    names = list(trainer.copier.outline(WHOLE).sizes)
    ann = trainer.copier.copy(WHOLE, names, "ann")
    bob = trainer.copier.copy(WHOLE, names, "bob")
    for copied in (ann, bob, ann):
        assert trainer.copier.piece(copied.ticket, names[0], 0, 4).is_whole
    trainer.copier.forget_all_but(["bob"])
    with pytest.raises(StaleEpoch):
        trainer.copier.piece(ann.ticket, names[0], 0, 4)
    assert trainer.copier.piece(bob.ticket, names[0], 0, 4).is_whole
    trainer.copier.copy(WHOLE, (), "bob")
    with pytest.raises(StaleEpoch):
        trainer.copier.piece(bob.ticket, names[0], 0, 4)


def test_a_request_above_the_limit_of_staged_copies_waits_for_others() -> None:
    trainer = Trainer()
    copier = Copier(lambda work: work(), lambda: (trainer.runner, trainer.step), most_cloned_bytes=1)
    names = list(copier.outline(WHOLE).sizes)
    copier.copy(WHOLE, names, "ann")
    copier.copy(WHOLE, names, "ann")
    with pytest.raises(StaleEpoch, match="other members fetch"):
        copier.copy(WHOLE, names, "bob")
    copier.copy(WHOLE, (), "ann")
    copier.copy(WHOLE, names, "bob")


def test_what_is_not_trained_and_came_first_is_kept_over_epochs(follow: Callable[..., Follower]) -> None:
    trainer, has_first, stopped = Trainer(freeze=("layers[:2]",)), threading.Event(), threading.Event()
    for _ in range(5):
        trainer.take_step()

    class Slow(Copier):
        """A primary that answers no call after the first one."""

        def copy(self, shard: ShardPart, names: Any) -> Copied:
            if "layers.0.weight" in names:
                return super().copy(shard, names)
            has_first.set()
            assert stopped.wait(60.0)
            raise StaleEpoch("the copy was cancelled", hint="no action needed")

    trainer.let_copy(Slow)
    follower = follow(trainer, batch_bytes=1)
    follower.follow("owner", lambda _: trainer.copier)
    assert has_first.wait(60.0)
    assert follower.inventory() == ["layers.0.weight"]
    assert follower.reaches(5)
    assert not follower.reaches(6)
    follower.spoil()
    stopped.set()


def test_a_disk_that_cannot_be_read_costs_the_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, reported = Trainer(), []
    follower = fetched(Follower(WHOLE, trainer.training, CPU, reported.append, CopyQuota()), trainer)
    trainer.take_step(follower)

    def fail(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    assert not follower.bring_to(1, trainer.scales)
    assert isinstance(reported[0], VerificationFailed)
    assert follower.is_spoilt
    follower.close()


def adopted(trainer: Trainer, shard: ShardPart) -> Trainer:
    """Return a trainer of some layers with the state of another trainer."""
    heir = Trainer(shard=shard)
    state = trainer.state()
    own = heir.runner.stage.persistent()
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])
    assert heir.runner.optimizer is not None
    slots = {name: tensor for name, tensor in state.items() if parameter_of(name) in own and name not in own}
    restore_optimizer(heir.runner.optimizer, heir.runner.parameters, slots)
    heir.step = trainer.step
    heir.runner.loss_scale = trainer.runner.loss_scale
    return heir


@pytest.mark.parametrize("is_copied", [True, False], ids=["from a copy", "from what it computed with"])
def test_a_copy_of_other_layers_begins_with_what_is_there(
    follow: Callable[..., Follower], *, is_copied: bool
) -> None:
    whole = Trainer()
    former = fetched(follow(whole), whole)
    for _ in range(3):
        whole.take_step(former)
    assert former.legacy(3) is None  # it has the updates of the first step at most
    assert former.bring_to(3, whole.scales)
    legacy = former.legacy(3) if is_copied else Legacy.of_runner(whole.runner, 3)
    assert legacy is not None
    owner = adopted(whole, ShardPart(1, 4))
    follower = follow(owner)
    copied = follower.inherit(owner.copier.outline(ShardPart(1, 4)), [legacy])
    former.close([copied])
    for _ in range(2):
        owner.take_step(follower)
    assert follower.bring_to(5, owner.scales)  # nothing was fetched
    assert same(follower, owner)


def test_only_who_is_alone_needs_a_backup() -> None:
    fleet = Topology(tuple(machine(name) for name in "abcd"))
    assert backups_of((("a",),), fleet) == {}
    assert backups_of((("a", "b"), ("c", "d")), fleet) == {}
    assert backups_of((("a",), ("b",)), fleet) == {"a": "b", "b": "a"}
    assert backups_of((("a", "b"), ("c",)), fleet) == {"c": "a"}


def test_each_share_is_backed_up_by_the_next_member_of_its_stage() -> None:
    fleet = Topology((machine("a"), machine("b", "cuda"), machine("c"), machine("d"), machine("e", "cuda")))
    shared = backups_of((("a", "c", "d"), ("b",)), fleet, shares_optimizer=True)
    assert shared == {"a": "c", "c": "d", "d": "a", "b": "a"}
    mixed = backups_of((("a", "b", "c", "e"),), fleet, shares_optimizer=True)
    assert mixed == {"a": "c", "c": "b", "b": "e", "e": "a"}


def test_backups_are_near_alike_and_not_all_the_same() -> None:
    links = (
        Link("a", "c", 0.0, 9e9),
        Link("a", "b", 0.0, 1e9),
        Link("b", "a", 0.0, 1e9),
        Link("c", "a", 0.0, 1e9),
    )
    fleet = Topology(tuple(machine(name) for name in "abcd"), links)
    assert backups_of((("a",), ("b",), ("c",), ("d",)), fleet) == {"a": "c", "b": "a", "c": "b", "d": "a"}
    mixed = Topology(
        (machine("a", "cuda"), machine("b"), machine("c", "cuda"), machine("d", memory_bytes=2**31))
    )
    assert backups_of((("a",), ("b",), ("c",)), mixed) == {"a": "c", "b": "a", "c": "a"}
    assert backups_of((("b",), ("a", "d")), mixed) == {"b": "d"}
    assert backups_of((("a",), ("b",), ("c",), ("d",)), fleet, present={"a": "d"})["a"] == "d"


def test_backups_reach_each_other() -> None:
    machines = tuple(machine(name) for name in "abc")
    stages = (("a",), ("b",), ("c",))
    assert backups_of(stages, Topology(machines))["c"] == "a"
    apart = Topology(machines, (Link.dead("a", "c"),))
    assert backups_of(stages, apart) == {"a": "b", "b": "a", "c": "b"}
    alone = Topology(machines, (Link.dead("a", "c"), Link.dead("c", "b")))
    assert "c" not in backups_of(stages, alone)


def test_backups_are_those_that_have_space_if_there_are_any() -> None:
    fleet = Topology((machine("a"), machine("b"), machine("c", "cuda"), machine("d")))
    stages = (("a",), ("b", "c", "d"))
    assert backups_of(stages, fleet, cramped={"b"}) == {"a": "d"}
    assert backups_of(stages, fleet, cramped={"b", "d"}) == {"a": "c"}
    assert backups_of(stages, fleet, cramped={"b", "c", "d"}) == {"a": "b"}
