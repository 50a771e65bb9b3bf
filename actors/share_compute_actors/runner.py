"""Runs one member's share of a step: its schedule of cells, the exchange of gradients, the update.

Knows the stage, the channel and the collective, but not Ray: `Member` makes it an actor.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from share_compute.models.blueprint import Stage, loss_sum
from share_compute.planning.cost import LayerTiming
from share_compute.training.gradients import GradientBuckets, clip_factor
from share_compute.training.optimizers import build_optimizer, learning_rates
from share_compute.training.schedule import Action, blocks, one_forward_one_backward
from share_compute_actors.channel import Channel
from share_compute_actors.collective import EpochGroup
from share_compute_actors.layer_timer import LayerTimer
from share_compute_actors.messages import EvaluationResult, Label, MemberId, MemberSetup, Phase, StepResult

_TIMED_STEPS = 3
"""Steps of an attempt whose layers are timed, after the first one, which also warms up."""

Rows = Mapping[int, Tensor]
"""By microbatch id."""


class Runner:
    """One member at work on one shard.

    Args:
        setup: what the coordinator said.
        stage: its shard, with weights.
        channel: links to all other members.
        names: machines by member, for errors.
        group: the other members of its pool, when there are any.
    """

    def __init__(
        self,
        setup: MemberSetup,
        stage: Stage,
        channel: Channel,
        names: Mapping[MemberId, str],
        group: EpochGroup | None,
    ) -> None:
        self._setup = setup
        self._stage = stage
        self._channel = channel
        self._names = names
        self._group = group
        self._device = next(stage.module.parameters(), torch.empty(0)).device
        self.parameters = stage.parameters()
        self._buckets = GradientBuckets(self.parameters)
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        self.optimizer = build_optimizer(setup.training.optimizer, trained) if trained else None
        self._learning_rate = learning_rates(setup.training)
        self._actions = one_forward_one_backward(setup.shares, setup.me.pool, setup.me.member)
        self._owners = [
            {microbatch: member for member, block in enumerate(blocks(shares)) for microbatch in block}
            for shares in setup.shares
        ]
        self._timer: LayerTimer | None = None
        self._tied: Parameter | None = None
        """The parameter that is embedding in the first pool and head in the last, when these are two pools."""
        if setup.tied is not None and stage.shard.is_first != stage.shard.is_last:
            self._tied = self.parameters[setup.tied]

    # -- training ------------------------------------------------------------------------------------------------

    def step(self, number: int, inputs: Rows, targets: Rows) -> StepResult:
        """Run one step: all own cells, then the exchange, then the update.

        Args:
            number: counted from 1.
            inputs: samples, ``[batch, ...]`` each; the first pool's.
            targets: ``[batch, ...]`` each; the last pool's.
        """
        start = time.perf_counter()
        self._channel.waited_s = 0.0
        if number == self._setup.first_step + 1:
            self._timer = LayerTimer(self._stage.layers, self._device)
        self._stage.module.train()
        self._buckets.zero()
        kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        losses: list[Tensor] = []
        reductions: deque[Callable[[], None]] = deque()
        last = len(self._actions) - 1
        for place, action in enumerate(self._actions):
            if place == last:
                self._watch(reductions)
            if action.kind == "F":
                kept[action.microbatch] = self._forward(number, action, inputs)
            else:
                self._backward(number, action, *kept.pop(action.microbatch), targets, losses)
        self._finish_reductions(reductions)
        self._exchange_tied(number)
        norm = self._clip(number)
        self._update(number)
        self._channel.forget(number)
        summed = float(torch.stack(losses).sum()) if losses else None
        return StepResult(
            me=self._setup.me,
            step=number,
            loss_sum=summed,
            targets=sum(target.numel() for target in targets.values()),
            gradient_norm=norm,
            seconds=time.perf_counter() - start,
            waited_s=self._channel.waited_s,
            layer_timings=self._layer_timings(number),
        )

    def _layer_timings(self, step: int) -> dict[int, LayerTiming] | None:
        """After the last timed step, return what was timed."""
        if self._timer is None or step < min(
            self._setup.first_step + _TIMED_STEPS, self._setup.training.steps
        ):
            return None
        timer, self._timer = self._timer, None
        return timer.finish()

    def _timed(self, way: Literal["forward", "backward"]) -> AbstractContextManager[None]:
        return self._timer.timing(way) if self._timer is not None else nullcontext()

    def _forward(self, step: int, action: Action, inputs: Rows) -> tuple[Tensor | None, Tensor]:
        microbatch, shard = action.microbatch, self._stage.shard
        arrived: Tensor | None = None
        if shard.is_first:
            entering = inputs[microbatch].to(self._device)
        else:
            entering = arrived = self._from_before("train", step, microbatch).requires_grad_()
        self._stage.prepare_cell(self._setup.training.seed, step, microbatch)
        with self._timed("forward"):
            outputs = self._stage.forward(entering)
        if not shard.is_last:
            self._to_next("train", step, microbatch, outputs)
        return arrived, outputs

    def _backward(
        self,
        step: int,
        action: Action,
        arrived: Tensor | None,
        outputs: Tensor,
        targets: Rows,
        losses: list[Tensor],
    ) -> None:
        microbatch = action.microbatch
        if self._stage.shard.is_last:
            wanted = targets[microbatch]
            with self._timed("backward"):
                loss = loss_sum(outputs, wanted)
                losses.append(loss.detach())
                # Every microbatch has as many targets as every other, so the mean over the step needs no exchange.
                (loss / (wanted.numel() * sum(self._setup.shares[0]))).backward()  # type: ignore[no-untyped-call]
        else:
            pool = self._setup.me.pool + 1
            label = Label("train", step, "gradient", microbatch, pool)
            gradient = self._receive(label, MemberId(pool, self._owners[pool][microbatch]))
            if outputs.requires_grad:  # not where a first shard has no parameters
                with self._timed("backward"):
                    outputs.backward(gradient)  # type: ignore[no-untyped-call]
        if arrived is not None and arrived.grad is not None:
            pool = self._setup.me.pool
            label = Label("train", step, "gradient", microbatch, pool)
            self._channel.send(MemberId(pool - 1, self._owners[pool - 1][microbatch]), label, arrived.grad)

    def _from_before(self, phase: Phase, step: int, microbatch: int) -> Tensor:
        pool = self._setup.me.pool - 1
        return self._receive(
            Label(phase, step, "activation", microbatch, pool),
            MemberId(pool, self._owner(phase, pool, microbatch)),
        )

    def _to_next(self, phase: Phase, step: int, microbatch: int, outputs: Tensor) -> None:
        pool = self._setup.me.pool
        owner = self._owner(phase, pool + 1, microbatch)
        self._channel.send(
            MemberId(pool + 1, owner), Label(phase, step, "activation", microbatch, pool), outputs
        )

    def _owner(self, phase: Phase, pool: int, microbatch: int) -> int:
        return (
            self._owners[pool][microbatch] if phase == "train" else microbatch % self._setup.pool_sizes[pool]
        )

    def _receive(self, label: Label, source: MemberId) -> Tensor:
        return self._channel.receive(label, self._names[source], self._setup.deadline_s).to(self._device)

    def _watch(self, reductions: deque[Callable[[], None]]) -> None:
        """During the last backward, start to reduce each bucket as soon as it is complete."""
        group = self._group
        if group is None:
            return
        self._buckets.watch(
            lambda number: reductions.append(group.start_allreduce(self._buckets.buckets[number]))
        )

    def _finish_reductions(self, reductions: deque[Callable[[], None]]) -> None:
        self._buckets.finish()
        start = time.perf_counter()
        while reductions:
            reductions.popleft()()
        self._channel.waited_s += time.perf_counter() - start

    def _exchange_tied(self, step: int) -> None:
        """Sum the gradients of a tied embedding and head, which live in the first and the last pool."""
        first, last = 0, len(self._setup.pool_sizes) - 1
        if self._tied is None:
            return
        own, other = (first, last) if self._setup.me.pool == first else (last, first)
        gradient = self._tied.grad
        assert gradient is not None
        if self._setup.me.member == 0:
            sent = gradient.clone()  # the sum below must not reach what is on its way
            for member in range(self._setup.pool_sizes[other]):
                self._channel.send(MemberId(other, member), Label("train", step, "tied", 0, own), sent)
        theirs = self._receive(Label("train", step, "tied", 0, other), MemberId(other, 0))
        gradient.add_(theirs)  # a + b = b + a: both pools get the same bits

    def _clip(self, step: int) -> float | None:
        limit = self._setup.training.max_gradient_norm
        if limit is None:
            return None
        duplicate = None if self._stage.shard.is_first else self._tied
        squares = [0.0] * len(self._setup.pool_sizes)
        me = self._setup.me
        squares[me.pool] = self._buckets.squared_norm(without=duplicate)
        if me.member == 0:
            own = torch.tensor([squares[me.pool]], dtype=torch.float64)
            for pool, size in enumerate(self._setup.pool_sizes):
                for member in range(1 if pool == me.pool else 0, size):
                    self._channel.send(MemberId(pool, member), Label("train", step, "norm", 0, me.pool), own)
        for pool in range(len(squares)):
            # A pool goes by what its first member counted: all must scale by the same bits.
            if MemberId(pool, 0) != me:
                squares[pool] = float(self._receive(Label("train", step, "norm", 0, pool), MemberId(pool, 0)))
        norm = math.sqrt(sum(squares))
        factor = clip_factor(norm, limit)
        if factor < 1.0:
            self._buckets.scale(factor)
        return norm

    def _update(self, step: int) -> None:
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.step()

    # -- evaluation ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self, phase: Phase, step: int, own: Sequence[int], inputs: Rows, targets: Rows
    ) -> EvaluationResult | None:
        """Run microbatches forward only; the last pool returns their loss, the others None."""
        self._stage.module.eval()
        total, count, correct = 0.0, 0, 0
        for microbatch in own:
            if self._stage.shard.is_first:
                entering = inputs[microbatch].to(self._device)
            else:
                entering = self._from_before(phase, step, microbatch)
            outputs = self._stage.forward(entering)
            if not self._stage.shard.is_last:
                self._to_next(phase, step, microbatch, outputs)
                continue
            wanted = targets[microbatch]
            total += float(loss_sum(outputs, wanted))
            count += wanted.numel()
            correct += int((outputs.argmax(-1).to(wanted.device) == wanted).sum())
        return EvaluationResult(total, count, correct) if self._stage.shard.is_last else None
