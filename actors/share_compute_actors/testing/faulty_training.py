"""Subclasses that inject faults into the coordinator's loop, and into a member's compute thread and outbox.

`share_compute_actors.training.faults` imports this module by its name if an attempt has a failure script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from share_compute.errors import ShareComputeError
from share_compute.protocol import coordinator
from share_compute.protocol.coordinator import Pause, PlanMembership, SendToMember, WriteStepLog
from share_compute.protocol.failures import InjectedFailure
from share_compute.protocol.member_events import (
    Apply,
    Compute,
    Effect,
    Event,
    Loaded,
    Log,
    Reduce,
    Reduced,
    ReduceFailed,
    Send,
    Updated,
)
from share_compute.protocol.membership import Worker
from share_compute.protocol.messages import Prepared, ToCoordinator, ToMember
from share_compute.protocol.points import RECEIVED, SENDING, Point
from share_compute_actors.messages import Followed, StepFigures
from share_compute_actors.testing.fault_injection import FaultInjector
from share_compute_actors.testing.message_faults import (
    MessageFaults,
    deviates,
    faulty_encoding,
    is_poisoned,
    wrong_tensor,
)
from share_compute_actors.training.coordinator.conductor import Conductor
from share_compute_actors.training.member.engine import TrainingEngine, described
from share_compute_actors.training.member.outbox import POLL_S, Outbox
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.samples import ShardSamples
from share_compute_actors.transport.channel import Channel, EncodedTensor
from share_compute_actors.transport.envelope import WireLabel


class FaultyConductor(Conductor):
    """A coordinator's loop that injects the faults of a failure script.

    Args:
        injector: executes the coordinator's part of the script.
        arguments: arguments of `Conductor`.
    """

    def __init__(self, injector: FaultInjector, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._injector = injector

    def _passes(self, point: Point) -> list[InjectedFailure]:
        return self._injector.passes(point, self._machine.committed + 1)

    def _work(self) -> None:
        super()._work()
        self._injector.messages.flush()

    def _take(self, worker: Worker, message: ToCoordinator, figures: StepFigures | None) -> None:
        self._passes(RECEIVED[type(message)])
        super()._take(worker, message, figures)

    def _carry_out(self, effect: coordinator.Effect) -> list[coordinator.Event]:
        match effect:
            case SendToMember(worker=worker, message=message):
                failures = self._passes(SENDING[type(message)])
                self._injector.messages.send(worker, lambda: self._group.send(worker, message), failures)
                return []
            case Pause():
                self._passes(Point.pausing)
                return super()._carry_out(effect)
            case PlanMembership():
                before, after = Point.planning, Point.planned
            case WriteStepLog(step=None):
                before, after = Point.epoch_recording, Point.epoch_recorded
            case WriteStepLog():
                before, after = Point.step_recording, Point.step_recorded
            case _:
                return super()._carry_out(effect)
        self._passes(before)
        answer = super()._carry_out(effect)
        self._passes(after)
        return answer


class FaultyEngine(TrainingEngine):
    """A compute thread that injects the faults of a failure script.

    Args:
        injector: executes this member's part of the script.
        arguments: arguments of `TrainingEngine`.
    """

    def __init__(self, injector: FaultInjector, *arguments: Any) -> None:
        self._injector = injector  # set before `super().__init__` starts the thread
        self._faults = injector.messages
        self._of_message: list[InjectedFailure] = []
        """Failures that apply to the message that is being sent to the coordinator."""
        super().__init__(*arguments)
        self._outbox = FaultyOutbox(injector, lambda: self._machine.applied + 1)
        self._send_message, self._notify = self._notify, self._notify_with_faults

    def _passes(self, point: Point) -> list[InjectedFailure]:
        return self._injector.passes(point, self._machine.applied + 1)

    # -- from other threads, and orders ------------------------------------------------------------------------------

    def receive(self, message: ToMember) -> None:
        """Queue a message from the coordinator; drop it while the link to the coordinator is cut."""
        if not self._faults.is_cut(None):
            super().receive(message)

    def progress(self) -> tuple[int, int]:
        """Wait while the link to the coordinator is cut; then return `TrainingEngine.progress`."""
        self._faults.wait_while_cut()
        return super().progress()

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

    def _work(self, longest_s: float = POLL_S) -> None:
        due_s = self._faults.flush()
        super()._work(longest_s if due_s is None else min(due_s, longest_s))

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

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case Apply():
                self._passes(Point.apply_starting)
            case Reduce():
                self._passes(Point.reduce_starting)
        answer = super()._carry_out(effect)
        match answer:
            case Updated():
                self._passes(Point.apply_done)
            case Reduced():
                if deviates(self._passes(Point.reduce_done)):
                    self._runner.deviate()
            case ReduceFailed() if self._machine.membership is not None:  # otherwise a halt came first
                self._passes(Point.reduce_failed)
        return answer

    def _run_cell(self, effect: Compute, *, reduces_inside: bool) -> None:
        is_spoilt = is_poisoned(self._passes(Point.cell_starting))
        super()._run_cell(effect, reduces_inside=reduces_inside and not is_spoilt)
        if is_spoilt:
            self._runner.spoil_cell(effect.action.kind, effect.action.microbatch, torch.nan)
        self._passes(Point.cell_done)

    def _send_output(self, channel: Channel, send: Send, tensor: Tensor) -> None:
        failures = self._passes(Point.tensor_sending)
        encoded = channel.write(send.target, WireLabel("train", *send.label), wrong_tensor(tensor, failures))
        _post(self._faults, channel, send.target, faulty_encoding(encoded, failures), failures)

    def _report(self, message: ToCoordinator) -> None:
        self._of_message = self._passes(SENDING[type(message)])
        super()._report(message)

    def _notify_with_faults(
        self, message: ToCoordinator | ShareComputeError, figures: StepFigures | None
    ) -> None:
        if isinstance(message, ShareComputeError):
            self._send_message(message, figures)
            return
        if isinstance(message, Prepared) and deviates(self._of_message):
            message = replace(message, digest="another")
        self._faults.send(None, lambda: self._send_message(message, figures), self._of_message)


class FaultyOutbox(Outbox):
    """An outbox that injects faults into the gradients that it sends.

    Args:
        injector: executes this member's part of the script.
        step: returns the number of the open step.
    """

    def __init__(self, injector: FaultInjector, step: Callable[[], int]) -> None:
        super().__init__()
        self._injector = injector
        self._step = step
        self._of_head: list[InjectedFailure] = []
        """Failures that apply to the header message of the gradient that is being sent."""

    def acknowledge(self, channel: Channel, followed: Followed, log: WireLabel) -> None:
        """Acknowledge to the primary that its gradient of a step has arrived at this member."""
        self._injector.passes(Point.log_received, log.step)
        super().acknowledge(channel, followed, log)

    def _send_log(self, channel: Channel, log: Log, stage: int, runner: Runner, *, is_repeated: bool) -> None:
        self._of_head = self._injector.passes(Point.log_sending, self._step())
        super()._send_log(channel, log, stage, runner, is_repeated=is_repeated)

    def _post_log(self, channel: Channel, holder: Worker, encoded: EncodedTensor) -> None:
        # Only the header, the first message, gets faults. A delayed message with a gradient bucket would arrive
        # changed, because applying the step changes the buckets.
        failures, self._of_head = self._of_head, []
        _post(self._injector.messages, channel, holder, encoded, failures)


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


def faulty(plain: Any, failures: Sequence[InjectedFailure], worker: Worker | None) -> Callable[..., Any]:
    """Return a factory of the subclass of ``plain`` that injects failures; see `with_faults`."""
    subclasses: dict[Any, Callable[..., Any]] = {Conductor: FaultyConductor, TrainingEngine: FaultyEngine}
    return partial(subclasses[plain], FaultInjector(failures, worker))
