"""Injects faults into a member's compute thread, in subclasses of `TrainingEngine` and `Outbox`.

A member uses these subclasses if its job has a failure script.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from share_compute.protocol.failures import InjectedFailure
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import Apply, Compute, Effect, Event, Loaded, Log, Reduce, Send
from share_compute.protocol.membership import Worker
from share_compute.protocol.messages import Prepared, ToCoordinator, ToMember
from share_compute.protocol.points import RECEIVED, SENDING, Point
from share_compute.protocol.tree import SummationTree
from share_compute_actors.messages import Followed, StepFigures
from share_compute_actors.testing.fault_injection import FaultInjector
from share_compute_actors.testing.message_faults import (
    MessageFaults,
    deviates,
    faulty_encoding,
    is_poisoned,
    wrong_tensor,
)
from share_compute_actors.training.backups.copies import Copies
from share_compute_actors.training.backups.logs import HEAD
from share_compute_actors.training.member.engine import NotifyCoordinator, TrainingEngine, described
from share_compute_actors.training.member.outbox import Outbox
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.samples import ShardSamples
from share_compute_actors.transport.channel import Channel, EncodedTensor
from share_compute_actors.transport.envelope import WireLabel


class FaultyEngine(TrainingEngine):
    """A compute thread that injects the faults of a failure script.

    Args:
        injector: executes this member's part of the script.
        machine: the member's protocol machine.
        tree: the order in which gradients are added.
        notify: sends a message or an error to the coordinator; called on the compute thread.
        copies: backup copies of other members' shards.
    """

    def __init__(
        self,
        injector: FaultInjector,
        machine: MemberMachine,
        tree: SummationTree,
        notify: NotifyCoordinator,
        copies: Copies,
    ) -> None:
        self._injector = injector  # set before `super().__init__` starts the thread
        self._faults = injector.messages
        self._of_message: list[InjectedFailure] = []
        """Failures that apply to the message that is being sent to the coordinator."""
        super().__init__(machine, tree, notify, copies)

    def _make_outbox(self) -> Outbox:
        return FaultyOutbox(self._faults, self._passes)

    def _passes(self, point: Point) -> list[InjectedFailure]:
        return self._injector.passes(point, self._machine.applied + 1)

    # -- from other threads, and orders ------------------------------------------------------------------------------

    def receive(self, message: ToMember) -> None:
        """Queue a message from the coordinator; drop it while the link to the coordinator is cut."""
        if not self._faults.is_cut(None):
            super().receive(message)

    def wait_while_cut(self) -> None:
        """Wait while the link to the coordinator is cut."""
        self._faults.wait_while_cut()

    def open(self, channel: Channel | None) -> None:
        """Switch to this channel, and drop delayed messages; call this through `order`."""
        if channel is not None:
            channel.is_cut = self._faults.is_cut
        self._faults.forget()
        super().open(channel)

    def equip(self, runner: Runner, samples: ShardSamples, loaded: Loaded) -> None:
        """Switch to this runner; see `TrainingEngine.equip`."""
        self._passes(Point.weights_loaded)
        super().equip(runner, samples, loaded)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _due_s(self) -> float | None:
        return self._faults.flush()

    def _take_event(self, event: Event) -> None:
        if isinstance(event, ToMember):
            self._passes(RECEIVED[type(event)])
        super()._take_event(event)

    def _decoded(self, label: WireLabel, source: Worker, arrived: Tensor) -> Tensor | None:
        tensor = super()._decoded(label, source, arrived)
        if tensor is None or label.cargo in ("logged", "log") or not self._passes(Point.tensor_received):
            return tensor
        self._reject(label, source, f"{described(label)}: it is said to be wrong")
        return None

    def _acknowledge(self, channel: Channel, followed: Followed, label: WireLabel) -> None:
        self._injector.passes(Point.log_received, label.step)
        super()._acknowledge(channel, followed, label)

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case Reduce():
                self._passes(Point.reduce_starting)
            case Apply():
                self._passes(Point.apply_starting)
        answer = super()._carry_out(effect)
        if isinstance(effect, Apply):
            self._passes(Point.apply_done)
        return answer

    def _run_cell(self, effect: Compute, *, reduces_inside: bool) -> None:
        is_spoilt = is_poisoned(self._passes(Point.cell_starting))
        super()._run_cell(effect, reduces_inside=reduces_inside and not is_spoilt)
        if is_spoilt:
            self._runner.spoil_cell(effect.action.kind, effect.action.microbatch, torch.nan)
        self._passes(Point.cell_done)

    def _reduces(self, point: Point) -> None:
        if deviates(self._passes(point)):
            self._runner.deviate()

    def _send_output(self, channel: Channel, send: Send, tensor: Tensor) -> None:
        failures = self._passes(Point.tensor_sending)
        encoded = channel.write(send.target, WireLabel("train", *send.label), wrong_tensor(tensor, failures))
        _post(self._faults, channel, send.target, faulty_encoding(encoded, failures), failures)

    def _report(self, message: ToCoordinator) -> None:
        self._of_message = self._passes(SENDING[type(message)])
        super()._report(message)

    def _deliver(self, message: ToCoordinator, figures: StepFigures | None) -> None:
        if isinstance(message, Prepared) and deviates(self._of_message):
            message = replace(message, digest="another")
        self._faults.send(None, lambda: self._notify(message, figures), self._of_message)


class FaultyOutbox(Outbox):
    """An outbox that injects faults into the gradients that it sends.

    Args:
        faults: sends messages with their injected faults.
        passes: see `FaultInjector.passes`; called with the protocol point.
    """

    def __init__(self, faults: MessageFaults, passes: Callable[[Point], list[InjectedFailure]]) -> None:
        super().__init__()
        self._faults = faults
        self._passes = passes
        self._of_log: list[InjectedFailure] = []
        """Failures that apply to the gradient that is being sent."""

    def _send_log(self, channel: Channel, log: Log, stage: int, runner: Runner, *, is_repeated: bool) -> None:
        self._of_log = self._passes(Point.log_sending)
        super()._send_log(channel, log, stage, runner, is_repeated=is_repeated)

    def _post_log(self, channel: Channel, holder: Worker, place: int, encoded: EncodedTensor) -> None:
        # Only the header message gets faults. A delayed message with a gradient bucket would arrive changed, because
        # applying the step changes the buckets.
        _post(self._faults, channel, holder, encoded, self._of_log if place == HEAD else [])


def _post(
    faults: MessageFaults,
    channel: Channel,
    target: Worker,
    encoded: EncodedTensor,
    failures: list[InjectedFailure],
) -> None:
    faults.send(
        target,
        lambda: channel.post(target, encoded),
        failures,
        lambda: channel.post(target, encoded.damaged()),
    )
