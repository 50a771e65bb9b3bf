"""What one member sends to others, and how it sees to it that nothing is lost unnoticed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from share_compute.protocol.failures import Failure
from share_compute.protocol.member_events import Log, Send
from share_compute.protocol.points import Point
from share_compute.protocol.roster import Worker
from share_compute_actors.member.channel import Channel, Letter
from share_compute_actors.member.copies.logs import HEAD, letters
from share_compute_actors.member.mishaps import Mishaps, wrong_letter, wrong_tensor
from share_compute_actors.member.runner import Runner
from share_compute_actors.messages import Followed, Label

GLANCE_S = 0.5
"""Longest wait for a tensor before the thread looks up; messages and orders wake it at once. Who waits says how much it
sent, and whether it misses something, as often as that."""
_AGAIN_S = 30.0
_SLOWEST_BYTES_PER_S = 1e6
"""After this time, and that which a gradient takes at this rate, it is given once more to who keeps a copy. A member
misses sooner what was lost, and begins another epoch; a machine that is in no pool yet cannot."""


class Post:
    """Sends tensors, as failures want it.

    Args:
        mishaps: carries out what goes wrong with them.
        passes: passes a point, and returns what goes wrong there.
    """

    def __init__(self, mishaps: Mishaps, passes: Callable[[Point], list[Failure]]) -> None:
        self._mishaps = mishaps
        self._passes = passes
        self._greeted_s = self._missed_s = time.monotonic()
        self._given: dict[Worker, tuple[int, int, float]] = {}
        """Epoch and step of the last gradient that was given to each who keeps a copy, and when that was."""

    def send(self, channel: Channel, send: Send, tensor: Tensor) -> None:
        """Send what a cell made."""
        failures = self._passes(Point.tensor_sending)
        letter = channel.write(send.target, Label("train", *send.label), wrong_tensor(tensor, failures))
        self._post(channel, send.target, wrong_letter(letter, failures), failures)

    def give(self, channel: Channel, log: Log, pool: int, runner: Runner) -> None:
        """Give a step's gradient to who keeps a copy; once more only after a long time.

        Args:
            channel: of the epoch.
            log: says which step, and to whom.
            pool: place of this member's.
            runner: has the whole gradient.
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
            # The first may arrive all the same: then the step is applied, and what is still on its way must not change.
            content = tensor.clone() if is_repeated else tensor
            letter = channel.write(log.keeper, Label("train", log.step, "log", place, pool), content)
            # The head alone meets failures: it does not change when the step is applied while it is late.
            self._post(channel, log.keeper, letter, failures if place == HEAD else [])

    def thank(self, channel: Channel, followed: Followed, log: Label) -> None:
        """Tell whose copy is kept here that a step's gradient came."""
        label = Label("train", log.step, "logged", followed.place, log.pool)
        channel.send(followed.owner, label, torch.zeros(1))
        channel.forget(log.step - 1)  # a machine that is in no pool yet has no other time to do so

    def misses(self, channel: Channel) -> bool:
        """Now and then let others miss what they lack; return whether it is time to say that something lacks here."""
        now_s = time.monotonic()
        if now_s - self._greeted_s > GLANCE_S:
            self._greeted_s = now_s
            channel.greet()
        if now_s - self._missed_s > GLANCE_S and channel.lacks():
            self._missed_s = now_s
            return True
        return False

    def _post(self, channel: Channel, target: Worker, letter: Letter, failures: list[Failure]) -> None:
        self._mishaps.send(
            target,
            lambda: channel.post(target, letter),
            failures,
            lambda: channel.post(target, letter.damaged()),
        )
