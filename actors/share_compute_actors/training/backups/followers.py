"""Backup copies of other members' shards, which can be brought to the last committed step when a primary is lost.

A copy consists of a snapshot on disk, and the reduced gradients of later steps. The snapshot is fetched from the
primary, parameter by parameter, while the primary continues to train. Parameters in the snapshot may therefore be from
different steps, so each parameter is updated separately. Updates use the job's optimizer. On a device of the same kind,
the result is bit-identical to the primary's parameters.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from share_compute.errors import ContributorLost, StaleEpoch, Unavailable, VerificationFailed
from share_compute.models.batch_norm import update_statistic
from share_compute.models.boundary import Expected
from share_compute.models.storage.slots import parameter_of
from share_compute.models.storage.weights import batches
from share_compute.protocol.membership import ShardPart
from share_compute.specification import TrainingSpec
from share_compute.training.loss_scale import SKIPPED, LossScale
from share_compute.training.optimizers import (
    build_optimizer,
    learning_rates,
    optimizer_tensors,
    restore_optimizer,
)
from share_compute_actors.training.backups.copy_quota import CopyQuota, is_out_of_space
from share_compute_actors.training.backups.copying import (
    ClonedTensor,
    Legacy,
    Primary,
    ShardOutline,
)
from share_compute_actors.training.backups.logs import HEAD, HEAD_SHAPE, GradientLog
from share_compute_actors.training.backups.tensor_file import TensorFile
from share_compute_actors.transport.pieces import TRIES, whole

_PIECE_BYTES = 2 * 2**20
_MOST_STEPS = 16
"""Maximum number of pending gradients. Beyond this limit, they are applied to the snapshot."""
_MOST_SNAPSHOTS = 2
"""Maximum size of pending gradients, as a multiple of the snapshot's size. Beyond this limit, they are applied to the
snapshot."""
_NONE: Mapping[int, float] = {}
_TRAINED = frozenset({torch.float32})
"""Allowed dtypes of the buckets of a gradient."""
_AGAIN_S = 0.5
"""Wait before a refused fetch is repeated, in seconds."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """Position of a trained parameter's gradient: the bucket, and elements [start, stop) of the bucket."""

    bucket: int
    start: int
    stop: int
    shape: tuple[int, ...]


class Follower:
    """A backup copy of one shard.

    `take`, `follow`, `inherit`, `forget_after` and `close` must all be called on the same thread. Long operations run
    on the copy's own thread, which has a low priority on Linux.

    Args:
        shard: layers [start, stop), and the share of the optimizer's state.
        training: training settings of the job.
        device: device on which the copy is updated. If it is of the same kind as the primary's device, the
            copy is bit-identical to the primary's shard.
        fail: called with an error, on the copy's own thread, when the copy has become unusable.
        quota: limits the space that all copies of this member take.
        batch_bytes: maximum size in bytes of the parameters and buffers that the primary clones in one call, without
            optimizer state. A larger tensor is cloned separately.
    """

    def __init__(
        self,
        shard: ShardPart,
        training: TrainingSpec,
        device: torch.device,
        fail: Callable[[Exception], None],
        quota: CopyQuota,
        batch_bytes: int = 64 * 2**20,
    ) -> None:
        self.shard = shard
        self._quota = quota
        self._batch_bytes = batch_bytes
        self._training = training
        self._device = device
        self._fail = fail
        self._learning_rate = learning_rates(training)
        self._outline: ShardOutline | None = None
        self._trained: dict[str, _Trained] = {}
        self._snapshot = TensorFile(quota)
        self._have: dict[str, int] = {}
        """Last step whose update the snapshot contains, by name of the parameter or buffer.

        The step of a tensor that is not trained also advances, although the tensor never changes."""
        self._logs: dict[int, GradientLog] = {}
        self._scales: dict[int, float] = {}
        """Update factors of committed steps, by step; only factors that the primary has sent."""
        self._rates: dict[int, float] = {}
        """Learning rates of these steps, if they depend on validations."""
        self._loss_scales: dict[int, LossScale] = {}
        """Loss scale after a step, by step. It is known for steps at which data was fetched or inherited, and for
        steps to which the snapshot was brought."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        """Event that cancels the running fetch."""
        self._owner: object = None
        self._fetching: Future[None] | None = None
        self._compacting: Future[None] | None = None
        self._catching_up: Future[None] | None = None
        self._own = ThreadPoolExecutor(1, "copy", _be_modest)
        self._is_fetched = False
        self.is_spoilt = False
        """Whether the copy is unusable, because it could not be fetched, stored or updated."""
        self._is_forgotten = False

    @property
    def is_whole(self) -> bool:
        """Whether the snapshot is complete and usable."""
        return self._is_fetched and not self.is_spoilt

    def catch_up(self) -> bool:
        """Apply the pending gradients once, in the background; return whether this work is done.

        The first call with a complete snapshot starts the work, so that few gradients are left to apply when
        training pauses.
        """
        if not self.is_whole:
            return False
        if self._catching_up is None:
            self._catching_up = self._submit(self._compact)
        return self._catching_up.done()

    # -- updating ----------------------------------------------------------------------------------------------------

    def follow(self, owner: object, reach: Callable[[threading.Event], Primary]) -> Future[None] | None:
        """Start to fetch missing data from a primary, in the background; stop a fetch from an earlier primary.

        Return a future of the fetch; None if nothing is missing.

        Args:
            owner: identifies the primary. A running fetch from the same primary continues.
            reach: returns the primary's interface, given an event. Once the event is set, pending calls raise
                `StaleEpoch`.
        """
        is_under_way = self._fetching is not None and not self._fetching.done()
        if self._is_fetched:
            return None
        if is_under_way and owner == self._owner and not self._stopping.is_set():
            return self._fetching
        self._stopping.set()
        self._owner, self._stopping = owner, threading.Event()
        primary, stopping = reach(self._stopping), self._stopping
        self._fetching = self._submit(lambda: self._fetch(primary, stopping))
        return self._fetching

    def inherit(self, outline: ShardOutline, legacies: Sequence[Legacy]) -> Future[None]:
        """Start this copy from data on this machine, in the background; return a future of this work.

        Args:
            outline: outline of the shard.
            legacies: states of shards on this machine, after the same step.
        """
        self._trained, self._outline = dict(_places(outline)), outline
        return self._submit(partial(self._inherit, outline, legacies))

    def legacy(self, step: int) -> Legacy | None:
        """Return the snapshot's data if it is complete and includes exactly the updates up to a step; otherwise None.

        Also return None if the loss scale after this step is unknown.
        """
        if not (self.is_at(step) and self.reaches(step)) or step not in self._loss_scales:
            return None
        return Legacy(self.shard, step, self._loss_scales[step], self.inventory(), self._state)

    def _state(self, name: str) -> dict[str, Tensor]:
        return {part: self._snapshot.get(part) for part in self._snapshot.names if parameter_of(part) == name}

    def take(self, step: int, place: int, tensor: Tensor) -> None:
        """Store one message of a step's gradient (see `gradient_messages`); a repeated message changes nothing.

        If many gradients are pending, start to apply them. If the copy is unusable, drop the message and
        release the copy's space.

        Args:
            step: number of the step.
            place: index of the message.
            tensor: content of the message.

        Raises:
            Unavailable: there is no space for the message, or it cannot be written.
        """
        if self.is_spoilt:
            self._release_space()
            return
        if step <= self._floor:
            return
        log = self._logs.get(step)
        if log is None:
            log = GradientLog(self._quota)
            with self._lock:
                self._logs[step] = log
        log.take(place, tensor)
        if not log.is_complete:
            return
        if log.head.scale_before is not None:
            self._scales[step - 1] = log.head.scale_before
            if log.head.rate_before is not None:
                self._rates[step - 1] = log.head.rate_before
        is_busy = self._compacting is not None and not self._compacting.done()
        if self.is_whole and not is_busy and self._is_long():
            self._compacting = self._submit(self._compact)

    def misfit(self, place: int, tensor: Tensor) -> str | None:
        """Return the defect of a message (see `gradient_messages`), as text; None if the message is valid."""
        if place == HEAD:
            return HEAD_SHAPE.misfit(tensor)
        buckets = None if self._outline is None else self._outline.buckets
        if buckets is None:
            return Expected(None, _TRAINED).misfit(tensor)
        if place not in range(len(buckets)):
            return f"it has no part {place}"
        size = sum(math.prod(shape) for _, shape in buckets[place])
        return Expected((size,), _TRAINED).misfit(tensor)

    def forget_after(self, step: int) -> None:
        """Drop the gradients of steps after this step."""
        with self._lock:
            later = [self._logs.pop(each) for each in sorted(self._logs) if each > step]
        for log in later:
            log.close()

    def has(self, step: int) -> bool:
        """Return whether the gradient of a step is complete, or no longer needed."""
        log = self._logs.get(step)
        return step <= self._floor or (log is not None and log.is_complete)

    def reaches(self, step: int) -> bool:
        """Return whether all tensors fetched so far can be brought to exactly this step.

        The copy must be usable and contain no later update. All gradients up to the step must be complete.
        """
        is_early = all(have <= step for have in list(self._have.values()))
        return (
            not self.is_spoilt
            and is_early
            and all(self.has(each) for each in range(self._floor + 1, step + 1))
        )

    def is_at(self, step: int) -> bool:
        """Return whether the snapshot is complete and includes at least all updates up to a step."""
        return self.is_whole and self._floor >= step

    def bring_to(self, step: int, scales: Mapping[int, float], rates: Mapping[int, float] = _NONE) -> bool:
        """Stop fetching, and apply gradients up to a committed step; return whether this succeeded.

        After success, `rows` returns tensors as they are after this step.

        Args:
            step: number of a committed step.
            scales: update factor of each committed step, by step.
            rates: learning rate of each of these steps, if it depends on validations.
        """
        self._stopping.set()
        return self._own.submit(self._bring_to, step, scales, rates).result()

    def spoil(self) -> None:
        """Mark the copy as unusable. The next call of `take` or `close` releases its space."""
        self.is_spoilt = True
        self._stopping.set()

    def close(self, after: Collection[Future[None]] = ()) -> Future[None] | None:
        """Delete the copy and release its space, after the futures in ``after`` are done, which read the copy.

        Return a future of the deletion; None if the data is deleted already, or its deletion has begun earlier.
        """
        released = self._release_space(after)
        self._own.shutdown(wait=False)
        return released

    def begin_after(self, futures: Collection[Future[None]]) -> None:
        """Delay all later work of this copy until these futures are done."""
        self._own.submit(wait, futures)

    def _release_space(self, after: Collection[Future[None]] = ()) -> Future[None] | None:
        """Delete all data, once the futures in ``after`` are done. Call this on the thread that calls `take`."""
        if self._is_forgotten:
            return None
        self._is_forgotten = True
        self._stopping.set()
        return self._own.submit(self._forget, after)

    # -- reading -----------------------------------------------------------------------------------------------------

    def inventory(self) -> list[str]:
        """Return the stored names of all parameters and buffers."""
        return [name for name in self._snapshot.names if parameter_of(name) == name]

    def optimizer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the optimizer's state tensors, by name."""
        return {
            name: self._snapshot.shape(name) for name in self._snapshot.names if parameter_of(name) != name
        }

    def rows(self, name: str, start: int, stop: int | None) -> Tensor:
        """Return rows [start, stop) of a parameter, a buffer, or a tensor of the optimizer's state."""
        return self._snapshot.rows(name, start, stop)

    def loss_scale(self) -> LossScale:
        """Return the loss scale after the last step to which the copy was brought."""
        return self._loss_scales[max(self._loss_scales)]

    # -- on its own thread -------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        def guarded() -> None:
            try:
                work()
            except Exception as failure:  # noqa: BLE001 - reported by `fail`
                self.spoil()
                self._fail(failure)

        return self._own.submit(guarded)

    def _inherit(self, outline: ShardOutline, legacies: Sequence[Legacy]) -> None:
        for name in outline.sizes:
            legacy = next((one for one in legacies if name in one.names), None)
            if legacy is None:
                continue
            for part, tensor in legacy.state(name).items():
                self._snapshot.put(part, tensor)
            self._loss_scales[legacy.step] = legacy.loss_scale
            self._have[name] = legacy.step
        if not outline.sizes and legacies:
            self._loss_scales[legacies[0].step] = legacies[0].loss_scale
        self._is_fetched = self._have.keys() == outline.sizes.keys() and bool(self._loss_scales)

    def _fetch(self, owner: Primary, stopping: threading.Event) -> None:
        # If `_inherit` found all data on this machine, the primary is not called, because it may be dead.
        while not (self._is_fetched or stopping.is_set()):
            try:
                self._fetch_missing(owner, stopping)
            except StaleEpoch:
                # The primary has no such shard, no such clones or no space for clones; or the fetch was cancelled.
                stopping.wait(_AGAIN_S)
            except Unavailable:
                with suppress(StaleEpoch):
                    owner.copy(self.shard, ())  # a call without names only drops the primary's clones
                raise
            else:
                return

    def _fetch_missing(self, owner: Primary, stopping: threading.Event) -> None:
        if self._outline is None:
            outline = owner.outline(self.shard)
            self._quota.require(outline.copy_bytes(self._training.state_tensors))
            self._trained, self._outline = dict(_places(outline)), outline
        missing = {name: size for name, size in self._outline.sizes.items() if name not in self._have}
        for names in batches(missing, self._batch_bytes):
            copied = owner.copy(self.shard, names)
            for part in copied.parts:
                self._snapshot.put(part.name, self._received(owner, stopping, copied.ticket, part))
            self._loss_scales[copied.step] = copied.loss_scale
            self._have.update(dict.fromkeys(names, copied.step))
            if self._is_long():
                self._compact()
        try:
            copied = owner.copy(self.shard, ())  # a call without names drops the primary's clones
        except ContributorLost:
            if not self._outline.sizes:
                raise  # this call was needed for the loss scale, the only state of a shard without parameters
        else:
            if not self._outline.sizes:
                self._loss_scales[copied.step] = copied.loss_scale
        self._is_fetched = True

    def _received(self, owner: Primary, stopping: threading.Event, ticket: int, part: ClonedTensor) -> Tensor:
        """Fetch one tensor. After each piece, pause for as long as its fetch took, because training uses the same link.

        Raises:
            ContributorLost: a piece arrived damaged in every attempt, or the primary died.
            StaleEpoch: the primary dropped the clones, or the fetch was cancelled.
        """
        tensor = torch.empty(part.shape, dtype=getattr(torch, part.dtype))
        content = tensor.reshape(-1).view(torch.uint8).numpy()
        damaged = ContributorLost(
            f"a piece of {part.name} arrived damaged {TRIES} times",
            hint="check the network between the machines, then resume the job",
        )
        for start in range(0, len(content), _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, len(content))
            began_s = time.perf_counter()
            piece = whole(partial(owner.piece, ticket, part.name, start, stop), damaged)
            content[start:stop] = piece.content
            if stopping.wait(time.perf_counter() - began_s):
                raise StaleEpoch("the copy was cancelled", hint="no action needed")
        return tensor

    def _is_long(self) -> bool:
        """Return whether pending gradients exceed `_MOST_STEPS` or `_MOST_SNAPSHOTS`."""
        with self._lock:
            logs = list(self._logs.values())
        return len(logs) > _MOST_STEPS or sum(log.nbytes for log in logs) > _MOST_SNAPSHOTS * max(
            self._snapshot.nbytes, 1
        )

    def _compact(self) -> None:
        """Apply pending gradients in order, until a step lacks its update factor or its complete gradient."""
        step = self._floor
        while self.has(step + 1) and step + 1 in self._scales:
            step += 1
        if step > self._floor:
            self._advance(step, dict(self._scales), dict(self._rates))

    def _bring_to(self, step: int, scales: Mapping[int, float], rates: Mapping[int, float]) -> bool:
        if not self.is_whole or not self.reaches(step):
            return False
        replayed = range(self._floor + 1, step + 1)
        if any(each not in scales for each in replayed) or not (
            step in self._logs or step in self._loss_scales
        ):
            return False
        try:
            self._advance(step, scales, rates)
        except Exception as failure:
            if not (is_out_of_space(failure) or isinstance(failure, VerificationFailed)):
                raise
            self.is_spoilt = True
            self._fail(failure)
        return not self.is_spoilt

    @property
    def _floor(self) -> int:
        """Last step whose update all fetched tensors include; -1 while the snapshot is empty.

        In a shard without parameters and buffers, the last step whose loss scale is known.
        """
        have = dict(self._have)
        if self._is_fetched and not have:
            return max(self._loss_scales)
        trained = [step for name, step in have.items() if name in self._trained]
        if self._trained and not trained:
            # No trained tensor has been fetched yet. Later fetches include all updates up to this step.
            return max(have.values(), default=-1)
        return min(trained or have.values(), default=-1)

    def _advance(self, step: int, scales: Mapping[int, float], rates: Mapping[int, float]) -> None:
        """Bring the snapshot to a step, one parameter after the other, and drop the gradients up to that step.

        Raises:
            Unavailable: there is no space for the updated tensors.
            VerificationFailed: data on the disk is damaged; the copy is unusable.
        """
        replayed = {name for name, have in self._have.items() if name in self._trained and have < step}
        for name in self._snapshot.names:
            if parameter_of(name) not in replayed:  # `_replay` verifies the other tensors when it reads them
                self._snapshot.get(name)
        for each in range(self._floor + 1, step + 1):
            self._logs[each].verify()
        for name, have in list(self._have.items()):
            if name in replayed:
                self._replay(name, range(have + 1, step + 1), scales, rates)
            self._have[name] = max(have, step)
        if step in self._logs:
            self._loss_scales[step] = self._logs[step].head.loss_scale.after(scales[step], step)
        self._loss_scales = {each: scale for each, scale in self._loss_scales.items() if each >= step}
        for each in [each for each in list(self._scales) if each <= step]:
            del self._scales[each]
            self._rates.pop(each, None)
        with self._lock:
            used = [self._logs.pop(each) for each in sorted(self._logs) if each <= step]
        for log in used:
            log.close()

    def _replay(
        self, name: str, steps: Collection[int], scales: Mapping[int, float], rates: Mapping[int, float]
    ) -> None:
        """Apply the gradients of some steps to one parameter, as the primary did.

        The whole parameter is updated at once, because kernels treat the last elements of a tensor differently.
        """
        place, outline = self._trained[name], self._outline
        assert outline is not None
        if name in outline.statistics:
            self._replay_statistic(name, steps, scales)
            return
        parameter = nn.Parameter(self._snapshot.get(name).to(self._device))
        optimizer = build_optimizer(
            self._training.optimizer, [parameter], [parameter] if name in outline.undecayed else ()
        )
        slots = [slot for slot in self._snapshot.names if slot != name and parameter_of(slot) == name]
        restore_optimizer(optimizer, {name: parameter}, {slot: self._snapshot.get(slot) for slot in slots})
        for step in steps:
            if scales[step] == SKIPPED:
                continue
            log = self._logs[step]
            gradient = log.gradient(place.bucket, place.start, place.stop).to(self._device)
            total = scales[step] / log.head.loss_scale.factor
            if total != 1.0:
                gradient.mul_(total)
            parameter.grad = gradient.view(place.shape)
            for group in optimizer.param_groups:
                group["lr"] = rates[step] if step in rates else self._learning_rate(step)
            optimizer.step()
        self._snapshot.put(name, parameter)
        for slot, value in optimizer_tensors(optimizer, {name: parameter}).items():
            self._snapshot.put(slot, value)

    def _replay_statistic(self, name: str, steps: Collection[int], scales: Mapping[int, float]) -> None:
        """Apply the sums of some steps to a running statistic, as the primary did."""
        assert self._outline is not None
        assert self._training.microbatches is not None
        running, place = self._snapshot.get(name).to(self._device), self._trained[name]
        for step in steps:
            if scales[step] == SKIPPED:
                continue
            observed = self._logs[step].gradient(place.bucket, place.start, place.stop).to(self._device)
            momentum = self._outline.statistics[name]
            microbatches = self._training.microbatches
            update_statistic(name, running, observed.view(place.shape), momentum, microbatches)
        self._snapshot.put(name, running)

    def _forget(self, after: Collection[Future[None]]) -> None:
        wait(after)
        self._snapshot.close()
        for log in self._logs.values():
            log.close()


def _places(outline: ShardOutline) -> Iterator[tuple[str, _Trained]]:
    for bucket, group in enumerate(outline.buckets):
        start = 0
        for name, shape in group:
            stop = start + torch.Size(shape).numel()
            yield name, _Trained(bucket, start, stop, shape)
            start = stop


def _be_modest() -> None:
    """Limit this thread to one core and, on Linux, to a low priority, so that training slows down less."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Increase the current niceness (15 in Ray's workers). Only privileged processes may decrease it.
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 10))
