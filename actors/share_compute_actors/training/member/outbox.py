"""Sends a member's gradients to its backups, and reports to receivers how many tensors were sent to them."""

from __future__ import annotations

import time

import torch

from share_compute.protocol.member_events import Log
from share_compute.protocol.membership import Worker
from share_compute_actors.messages import Followed
from share_compute_actors.training.backups.logs import gradient_messages
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.transport.channel import Channel, EncodedTensor
from share_compute_actors.transport.envelope import WireLabel

POLL_S = 0.5
"""Longest wait of the compute thread for a tensor, in seconds. Messages and calls of `order` end it early.

It is also the minimum interval between reports in `Outbox.misses`."""
_AGAIN_S = 30.0
_SLOWEST_BYTES_PER_S = 1e6
"""Lowest expected transfer rate, in bytes per second.

A gradient is sent again at the earliest after `_AGAIN_S` seconds plus its transfer time at this rate."""


class Outbox:
    """Sends gradients to backup members, acknowledges received gradients, and reports how many tensors were sent."""

    def __init__(self) -> None:
        self._reported_s = self._missed_s = time.monotonic()
        self._given: dict[Worker, tuple[int, int, float]] = {}
        """Epoch and step of the last gradient that was sent to each backup member, and the time when it was sent."""

    def give(self, channel: Channel, log: Log, stage: int, runner: Runner) -> None:
        """Send a step's gradient to a backup member or catch-up replica.

        A repeated call for the same epoch, step and receiver may do nothing (see `_SLOWEST_BYTES_PER_S`).

        Args:
            channel: channel of the epoch.
            log: the step and the receiver.
            stage: index of this member's stage.
            runner: runner with the complete gradient.
        """
        now_s = time.monotonic()
        *last, given_s = self._given.get(log.holder, (0, 0, 0.0))
        is_repeated = last == [channel.epoch, log.step]
        if (
            is_repeated
            and now_s - given_s < _AGAIN_S + sum(runner.gradients.bucket_bytes) / _SLOWEST_BYTES_PER_S
        ):
            return
        self._send_log(channel, log, stage, runner, is_repeated=is_repeated)
        # An upload limit may delay the messages, so the time counts from the last message.
        self._given[log.holder] = channel.epoch, log.step, time.monotonic()

    def _send_log(self, channel: Channel, log: Log, stage: int, runner: Runner, *, is_repeated: bool) -> None:
        for place, tensor in gradient_messages(
            runner.gradients, runner.loss_scale, *runner.update_of(log.step - 1)
        ):
            # If the first message arrives, the step may be applied while the repeated message is in transit.
            # Applying the step changes the gradient, so the repeated message carries a copy of it.
            content = tensor.clone() if is_repeated else tensor
            encoded = channel.write(log.holder, WireLabel("train", log.step, "log", place, stage), content)
            self._post_log(channel, log.holder, encoded)

    def _post_log(self, channel: Channel, holder: Worker, encoded: EncodedTensor) -> None:
        channel.post(holder, encoded)

    def acknowledge(self, channel: Channel, followed: Followed, log: WireLabel) -> None:
        """Acknowledge to the primary that its gradient of a step has arrived at this member."""
        label = WireLabel("train", log.step, "logged", followed.place, log.stage)
        channel.send(followed.owner, label, torch.zeros(1))
        # A catch-up replica applies no steps, so only this line drops its records of received tensors.
        channel.forget(log.step - 1)

    def misses(self, channel: Channel) -> bool:
        """Report to receivers how many tensors were sent; return whether a tensor for this member is missing.

        Reports are more than `POLL_S` seconds apart, and so are calls that return True.
        """
        now_s = time.monotonic()
        if now_s - self._reported_s > POLL_S:
            self._reported_s = now_s
            channel.report_sent()
        if now_s - self._missed_s > POLL_S and channel.lacks():
            self._missed_s = now_s
            return True
        return False
