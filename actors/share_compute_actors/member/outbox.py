"""Sends one member's tensors to others, and makes losses noticeable."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from share_compute.protocol.failures import Failure
from share_compute.protocol.member_events import Log, Send
from share_compute.protocol.points import Point
from share_compute.protocol.roster import Worker
from share_compute_actors.member.copies.logs import HEAD, letters
from share_compute_actors.member.runner import Runner
from share_compute_actors.messages import Followed
from share_compute_actors.testing.message_faults import MessageFaults, wrong_letter, wrong_tensor
from share_compute_actors.transport.channel import Channel, Letter
from share_compute_actors.transport.envelope import Label

POLL_S = 0.5
"""Longest wait for a tensor before the thread does other work, in seconds; messages and calls of `order` wake it at
once. A waiting member reports at the same interval how much it sent, and whether a tensor is missing."""
_AGAIN_S = 30.0
_SLOWEST_BYTES_PER_S = 1e6
"""Minimum time before a gradient is sent to a backup member again: `_AGAIN_S`, plus the transfer time at this rate.
Members notice a loss sooner, and begin another epoch. A machine that is not in a stage yet cannot do that."""


class Outbox:
    """Sends tensors, with injected faults.

    Args:
        faults: sends letters with their injected faults.
        passes: passes a protocol point, and returns the failures that apply there.
    """

    def __init__(self, faults: MessageFaults, passes: Callable[[Point], list[Failure]]) -> None:
        self._faults = faults
        self._passes = passes
        self._reported_s = self._missed_s = time.monotonic()
        self._given: dict[Worker, tuple[int, int, float]] = {}
        """Epoch and step of the last gradient that was sent to each backup member, and the time when it was sent."""

    def send(self, channel: Channel, send: Send, tensor: Tensor) -> None:
        """Send the output of a cell."""
        failures = self._passes(Point.tensor_sending)
        letter = channel.write(send.target, Label("train", *send.label), wrong_tensor(tensor, failures))
        self._post(channel, send.target, wrong_letter(letter, failures), failures)

    def give(self, channel: Channel, log: Log, pool: int, runner: Runner) -> None:
        """Send a step's gradient to a backup member; send it again only after a long time.

        Args:
            channel: channel of the epoch.
            log: the step and the receiver.
            pool: index of this member's stage.
            runner: runner with the complete gradient.
        """
        now_s = time.monotonic()
        *last, given_s = self._given.get(log.keeper, (0, 0, 0.0))
        is_repeated = last == [channel.epoch, log.step]
        if (
            is_repeated
            and now_s - given_s < _AGAIN_S + sum(runner.gradients.bucket_bytes) / _SLOWEST_BYTES_PER_S
        ):
            return
        self._given[log.keeper] = channel.epoch, log.step, now_s
        failures = self._passes(Point.log_sending)
        for place, tensor in letters(runner.gradients, runner.loss_scale, runner.scale_of(log.step - 1)):
            # The first copy may still arrive. Then the step is applied, and a tensor that is still in transit must not
            # change.
            content = tensor.clone() if is_repeated else tensor
            letter = channel.write(log.keeper, Label("train", log.step, "log", place, pool), content)
            # Only the head is subject to faults: it does not change if the step is applied while the head is delayed.
            self._post(channel, log.keeper, letter, failures if place == HEAD else [])

    def acknowledge(self, channel: Channel, followed: Followed, log: Label) -> None:
        """Acknowledge to the primary that a step's gradient arrived here."""
        label = Label("train", log.step, "logged", followed.place, log.pool)
        channel.send(followed.owner, label, torch.zeros(1))
        channel.forget(log.step - 1)  # a machine that is not in a stage yet has no other occasion

    def misses(self, channel: Channel) -> bool:
        """Report sent counts at intervals, so that others notice losses; return whether to report a loss here."""
        now_s = time.monotonic()
        if now_s - self._reported_s > POLL_S:
            self._reported_s = now_s
            channel.report_sent()
        if now_s - self._missed_s > POLL_S and channel.lacks():
            self._missed_s = now_s
            return True
        return False

    def _post(self, channel: Channel, target: Worker, letter: Letter, failures: list[Failure]) -> None:
        self._faults.send(
            target,
            lambda: channel.post(target, letter),
            failures,
            lambda: channel.post(target, letter.damaged()),
        )
