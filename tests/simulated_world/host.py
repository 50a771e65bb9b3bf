"""A machine of the simulated world, with a member on it: carries out the effects of the member's state machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from tests.simulated_world.network import Action
from tests.simulated_world.process import Process
from tests.simulated_world.symbols import MISFIT, NOT_FINITE, Gradient, Symbol, Weights
from tests.simulated_world.vault import Vault

from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import (
    Apply,
    Arrived,
    Compute,
    Computed,
    Discard,
    Effect,
    Event,
    Gather,
    Gathered,
    GatherFailed,
    Loaded,
    Log,
    Logged,
    Misfit,
    Missed,
    Reduce,
    Reduced,
    ReduceFailed,
    Send,
    SendToCoordinator,
    Updated,
)
from share_compute.protocol.membership import ShardPart, Worker
from share_compute.protocol.messages import (
    Form,
    Halt,
    Prepared,
    TensorLabel,
    ToCoordinator,
    ToMember,
)
from share_compute.protocol.points import RECEIVED, SENDING, Point
from share_compute.protocol.tree import Node

if TYPE_CHECKING:
    from tests.simulated_world.world import World


@dataclass
class _Work:
    """Results of a host in the open step."""

    sums: dict[Node, Gradient] = field(default_factory=dict)
    values: dict[int, list[Symbol]] = field(default_factory=dict)
    """Input of each layer, by microbatch. A backward needs these values."""
    outputs: dict[int, Symbol] = field(default_factory=dict)
    gradients: dict[int, Symbol] = field(default_factory=dict)
    """Gradient of the shard's input, by microbatch."""
    received: dict[TensorLabel, Symbol] = field(default_factory=dict)
    reduced: Gradient | None = None


class Host(Process):
    """One machine, from its start to its death.

    Args:
        worker: name of its member.
        world: world of the machine.
        machine: state machine of the member.
    """

    def __init__(self, worker: Worker, world: World, machine: MemberMachine) -> None:
        super().__init__(worker, world, worker)
        self.worker = worker
        self.machine = machine
        self.part = ShardPart(0, 0)
        self.weights: Weights = {}
        self.vaults: dict[ShardPart, Vault] = {}
        self.scales: dict[int, float] = {}
        """Gradient factor of each step that the member applied."""
        self.next_layout: tuple[int, ShardPart, Weights] | None = None
        """Epoch, part and weights that the member takes over if that epoch begins."""
        self._work = _Work()
        self._is_poisoned = False
        """Whether the running cell makes numbers that are not finite."""

    @property
    def shard(self) -> tuple[int, int]:
        """Layers [start, stop) of the member."""
        return self.part.start, self.part.stop

    @property
    def own(self) -> Weights:
        """Weights of the layers that the member updates."""
        own = self._world.model.own_layers(self.part)
        return {layer: value for layer, value in self.weights.items() if layer in own}

    @property
    def open_step(self) -> int:
        """Step that the member works on."""
        return self.machine.applied + 1

    @property
    def lasting_layers(self) -> set[int]:
        """Layers whose weights stay here even when a message that is on its way arrives."""
        layers = set(self.own)
        if self.machine.membership is None and self.next_layout is not None:
            epoch, part, _ = self.next_layout
            if epoch == self.machine.epoch:
                layers &= self._world.model.own_layers(part)
        return layers

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, message: ToMember) -> None:
        """Take a message of a coordinator from the network."""
        self.push(self._passing(RECEIVED[type(message)]))
        self.push(lambda: self._on_message(message))

    def _on_message(self, message: ToMember) -> None:
        was_halted = self.machine.membership is None
        if isinstance(message, Halt) and message.epoch > self.machine.epoch:
            self._world.leave_reductions(self.worker)
        self._handle(message)
        began = was_halted and self.machine.membership is not None
        if began and isinstance(message, Form) and not message.keeps_step:
            assert self.next_layout is not None
            epoch, self.part, self.weights = self.next_layout
            assert epoch == message.epoch

    def receive_tensor(self, epoch: int, label: TensorLabel, value: Symbol, source: Worker) -> None:
        """Take a tensor from the network."""
        failures: list[InjectedFailure] = []

        def take() -> None:
            if failures or value in (MISFIT, NOT_FINITE):
                is_certain = bool(failures) or value == MISFIT
                self._handle(Misfit(epoch, source, label, "it is wrong", is_certain))
                return
            if epoch == self.machine.epoch and label.step >= self.open_step:
                self._work.received[label] = value
            self._handle(Arrived(epoch, label))

        self.push(lambda: failures.extend(self._pass(Point.tensor_received)))
        self.push(take)

    def receive_log(self, log: Log, epoch: int, owner: Worker, part: ShardPart, gradient: Gradient) -> None:
        """Keep the gradient of a part that is copied here, and acknowledge it."""

        def keep() -> None:
            if part not in self.vaults:
                return
            self.vaults[part].gradients[log.step] = gradient
            logged = Logged(epoch, log.step, log.place)
            self._first(
                self._sending(
                    Point.log_received, owner, lambda: self._world.hosts[owner].receive_event(logged)
                )
            )

        self.push(keep)

    def receive_event(self, event: Event) -> None:
        """Take an event that has no point of its own."""
        self.push(lambda: self._handle(event))

    def load(self, loaded: Loaded, part: ShardPart, weights: Weights) -> None:
        """Take weights that were sent here, unless an epoch has begun since."""

        def take() -> None:
            effects = self.machine.handle(loaded)
            if effects:
                self.part, self.weights = part, dict(weights)
                self._first(action for effect in effects for action in self._actions(effect))

        self.push(take)
        self.push(self._passing(Point.weights_loaded))

    def _handle(self, event: Event) -> None:
        self._first(action for effect in self.machine.handle(event) for action in self._actions(effect))

    # -- effects -----------------------------------------------------------------------------------------------------

    def _actions(self, effect: Effect) -> list[Action]:  # noqa: PLR0911 - a return for each effect
        """Return the actions that carry out an effect."""
        match effect:
            case Compute():
                return [self._starting, self._compute(effect)]
            case Send():
                return [lambda: self._send(effect)]
            case Reduce():
                return [self._passing(Point.reduce_starting), lambda: self._reduce(effect)]
            case Log():
                return self._log(effect)
            case Apply():
                return [self._passing(Point.apply_starting), lambda: self._apply(effect)]
            case Gather():
                return [self._gather]
            case Discard():
                return [self._discard]
            case SendToCoordinator():
                return self._notify(effect.message)

    def _starting(self) -> None:
        failures = self._pass(Point.cell_starting)
        self._is_poisoned = any(failure.kind is FailureKind.poison for failure in failures)

    def _compute(self, compute: Compute) -> Action:
        membership = self.machine.membership
        assert membership is not None
        stage = membership.stage_of(self.worker)
        microbatch, is_forward = compute.action.microbatch, compute.action.kind == "F"

        def run() -> None:
            if is_forward:
                label = TensorLabel(compute.step, "activation", microbatch, stage - 1)
                value = (
                    self._world.model.sample(compute.step, microbatch)
                    if stage == 0
                    else self._work.received[label]
                )
                self._later(lambda: self._forward(compute, value))
            else:
                label = TensorLabel(compute.step, "gradient", microbatch, stage + 1)
                is_last = stage + 1 == len(membership.stages)
                gradient = None if is_last else self._work.received[label]
                self._later(lambda: self._backward(compute, gradient))

        return run

    def _later(self, action: Action) -> None:
        """Run an action after the time of a computation. It has no effect if the machine dies meanwhile."""
        self._world.clock.after(self._world.compute_s(), lambda: self.push(action))

    def _forward(self, compute: Compute, value: Symbol) -> None:
        values = [value]
        for layer in range(*self.shard):
            values.append(self._world.model.forward(self.weights[layer], values[-1]))
        microbatch = compute.action.microbatch
        if self._is_poisoned or self._world.model.diverges(compute.step, microbatch, self.shard):
            values[-1] = NOT_FINITE
        self._work.outputs[microbatch] = values[-1]
        if compute.has_backward:
            self._work.values[microbatch] = values
        self._end_cell(compute, is_finite=values[-1] != NOT_FINITE)

    def _end_cell(self, compute: Compute, *, is_finite: bool) -> None:
        computed = Computed(compute.action, is_finite or not compute.is_checked)
        self._first([self._passing(Point.cell_done), lambda: self._handle(computed)])

    def _backward(self, compute: Compute, gradient: Symbol | None) -> None:
        model, microbatch = self._world.model, compute.action.microbatch
        values = self._work.values.pop(microbatch)
        if gradient is None:
            gradient = model.loss(compute.step, microbatch, values[-1])
        if self._is_poisoned:
            gradient = NOT_FINITE
        gradients: Gradient = {}
        for layer in reversed(range(*self.shard)):
            gradient, gradients[layer] = model.backward(
                self.weights[layer], values[layer - self.shard[0]], gradient
            )
        self._work.gradients[microbatch] = gradient
        if compute.adds:
            model.merge(self._work.sums, Node(microbatch, microbatch + 1), gradients)
        self._end_cell(compute, is_finite=NOT_FINITE not in gradients.values())

    def _send(self, send: Send) -> None:
        epoch, label = self.machine.epoch, send.label
        match label.cargo:
            case "activation":
                value = self._work.outputs[label.microbatch]
            case "gradient":
                value = self._work.gradients[label.microbatch]
            case _:
                assert self._work.reduced is not None
                value = self._work.reduced[0 if label.stage == 0 else self._world.model.layers - 1]
        failures: list[InjectedFailure] = []
        self._first(
            self._sending(
                Point.tensor_sending,
                send.target,
                lambda: self._world.hosts[send.target].receive_tensor(
                    epoch, label, _as_sent(value, failures), self.worker
                ),
                lambda: self._world.hosts[send.target].receive_event(Missed(epoch)),
                failures,
            )
        )

    def _reduce(self, reduce: Reduce) -> None:
        membership = self.machine.membership
        if membership is None:  # halted before it began
            self._end_reduction(ReduceFailed(is_spoilt=False), None)
            return

        def answer(ended: Reduced | ReduceFailed, result: Gradient | None) -> None:
            self.push(lambda: self._end_reduction(ended, result))

        reduction = self._world.reduction(membership, membership.stage_of(self.worker), reduce)
        reduction.enter(self.worker, dict(self._work.sums), self._work.reduced, answer)

    def _end_reduction(self, ended: Reduced | ReduceFailed, result: Gradient | None) -> None:
        if isinstance(ended, Reduced):
            assert result is not None
            own = self._world.model.own_layers(self.part)
            self._work.reduced = {layer: value for layer, value in result.items() if layer in own}
        elif ended.is_spoilt:
            self._work.sums.clear()
        point = Point.reduce_done if isinstance(ended, Reduced) else Point.reduce_failed

        def end() -> None:
            if _deviates(self._pass(point)):
                assert self._work.reduced is not None
                self._work.reduced = {layer: value + 1 for layer, value in self._work.reduced.items()}

        self._first([end, lambda: self._handle(ended)])

    def _gather(self) -> None:
        membership = self.machine.membership
        if membership is None:  # halted before it began
            self._end_gather(GatherFailed(), {})
            return

        def answer(ended: Gathered | GatherFailed, arrived: Weights) -> None:
            self.push(lambda: self._end_gather(ended, arrived))

        exchange = self._world.exchange(membership, membership.stage_of(self.worker), self.machine.applied)
        exchange.enter(self.worker, self.own, answer)

    def _end_gather(self, ended: Gathered | GatherFailed, arrived: Weights) -> None:
        self.weights |= arrived
        if isinstance(ended, Gathered):
            self._world.checks.weights(self, self.weights, self.machine.applied)
        self._handle(ended)

    @property
    def _complete(self) -> Gradient:
        work, is_first = self._work, self.shard[0] == 0
        assert work.reduced is not None
        others = (
            value
            for label, value in work.received.items()
            if label.cargo == "tied" and label.step == self.open_step and (label.stage == 0) != is_first
        )
        return self._world.model.complete(work.reduced, next(others, None))

    def _log(self, log: Log) -> list[Action]:
        epoch, part, gradient = self.machine.epoch, self.part, self._complete
        return self._sending(
            Point.log_sending,
            log.holder,
            lambda: self._world.hosts[log.holder].receive_log(log, epoch, self.worker, part, gradient),
        )

    def _apply(self, apply: Apply) -> None:
        self._world.checks.before_update(self, apply)
        self._later(lambda: self._update(apply))

    def _update(self, apply: Apply) -> None:
        gradient = self._complete
        for layer, symbol in self.own.items():
            self.weights[layer] = self._world.model.update(symbol, gradient[layer], apply.scale)
        self.scales[apply.step] = apply.scale
        self._forget(apply.step)
        self._world.checks.weights(self, self.own, apply.step)
        self._first([self._passing(Point.apply_done), lambda: self._handle(Updated(apply.step))])

    def _forget(self, step: int) -> None:
        """Forget the tensors of a step, and keep those of later steps, which faster members may already have sent."""
        received = {label: value for label, value in self._work.received.items() if label.step > step}
        self._work = _Work(received=received)

    def _discard(self) -> None:
        self._work = _Work(received=self._work.received)

    def _notify(self, message: ToCoordinator) -> list[Action]:
        has_peers = False
        if isinstance(message, Prepared):
            complete, membership = self._complete, self.machine.membership
            assert membership is not None
            place = membership.stage_of(self.worker)
            has_shares = membership.has_shares(place)
            has_peers = len(membership.stages[place]) > 1 and not has_shares
            self._world.on_prepared(membership, message)
            message = Prepared(
                message.epoch,
                message.worker,
                message.step,
                squared_norms=self._world.model.norms(complete),
                digest="" if has_shares else self._world.model.digest(complete),
            )
        failures: list[InjectedFailure] = []

        def send() -> None:
            nonlocal message
            if isinstance(message, Prepared) and has_peers and _deviates(failures):
                message = replace(message, digest="another")
            for seat in self._world.seats:
                self._world.network.send(self.name, seat.name, partial(seat.receive, message), failures)

        return [lambda: failures.extend(self._pass(SENDING[type(message)])), send]


def _deviates(failures: list[InjectedFailure]) -> bool:
    return any(failure.kind is FailureKind.deviate for failure in failures)


def _as_sent(value: Symbol, failures: list[InjectedFailure]) -> Symbol:
    """Return the value that a receiver gets of a tensor."""
    for failure in failures:
        if failure.kind is FailureKind.poison:
            return NOT_FINITE
        if failure.kind.is_wrong_number:
            return MISFIT
    return value
