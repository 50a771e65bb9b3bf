"""A member's compute thread: it executes the effects of the protocol machine, and calls from other threads.

Other threads queue messages and calls for this thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from share_compute.compression.boundaries import decoded
from share_compute.errors import ContributorLost, ShareComputeError, VerificationFailed
from share_compute.protocol.cells import holders
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import (
    Apply,
    Arrived,
    Compute,
    Computed,
    ComputeFailed,
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
    RetransmissionTimeout,
    Send,
    SendToCoordinator,
    Updated,
)
from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.messages import Halt, Prepared, ToCoordinator, ToMember
from share_compute.protocol.tree import Node, SummationTree
from share_compute.sharding.outdated import Outdated
from share_compute_actors.group.allocator import as_reported
from share_compute_actors.group.compute_thread import ComputeThread
from share_compute_actors.messages import StepFigures
from share_compute_actors.training.backups.copies import Copies
from share_compute_actors.training.backups.copying import Copier, Legacy
from share_compute_actors.training.member.outbox import POLL_S, Outbox
from share_compute_actors.training.member.runner import Runner
from share_compute_actors.training.member.samples import ShardSamples
from share_compute_actors.training.member.slice_runner import SliceRunner
from share_compute_actors.training.member.step_clock import StepClock
from share_compute_actors.transport.channel import Channel
from share_compute_actors.transport.collective.backend import EpochGroup, abort_group, leave_group
from share_compute_actors.transport.envelope import WireLabel

_READS = Compute, Send, Log, SendToCoordinator
"""Effects that never change parameters."""
_TICK_S = 5.0
"""Minimum time between two `RetransmissionTimeout` events, in seconds."""


class Forming(NamedTuple):
    """A process group that is being formed."""

    epoch: int
    name: str


NotifyCoordinator = Callable[[ToCoordinator | ShareComputeError, StepFigures | None], None]


class TrainingEngine(ComputeThread):
    """Runs one member's compute thread.

    Args:
        machine: the member's protocol machine.
        tree: the order in which gradients are added.
        notify: sends a message or an error to the coordinator; called on the compute thread.
        copies: backup copies of other members' shards.
        on_failure: as in `ComputeThread`.
    """

    def __init__(
        self,
        machine: MemberMachine,
        tree: SummationTree,
        notify: NotifyCoordinator,
        copies: Copies,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(on_failure)
        self._machine = machine
        self._tree = tree
        self._notify = notify
        self.copies = copies
        self.copier = Copier(self.order, lambda: (self.runner, machine.applied))
        self._outbox = Outbox()
        self.runner: Runner | None = None
        self.group: EpochGroup | None = None
        self.forming: Forming | None = None
        """Process group that is being formed; None after `join`."""
        self._group_epoch = 0
        self._samples: ShardSamples | None = None
        self._arrived: dict[tuple[str, int, int], Tensor] = {}
        """Tensors from other members, by (cargo, step, microbatch). The key of a tied sum is (cargo, step, stage)."""
        self._events: deque[Event] = deque()
        self._effects: deque[Effect] = deque()
        self.outdate: Callable[[Outdated], None] = lambda _: None
        """Called after all work except that of `_READS`, because it may have changed parameters; see `Ranks.outdate`.

        Only the compute thread changes parameters."""
        self._clock = StepClock()
        self._polled_s = time.monotonic()
        self._start()

    # -- from other threads ------------------------------------------------------------------------------------------

    def receive(self, message: ToMember) -> None:
        """Queue a message from the coordinator; a halt also interrupts the compute thread's waits of earlier epochs."""
        with self._news:
            self._events.append(message)
            self._news.notify()
            channel, group, forming = self.channel, self.group, self.forming
        if channel is not None:
            is_over = isinstance(message, Halt) and channel.epoch < message.epoch
            channel.interrupt() if is_over else channel.wake()
        if isinstance(message, Halt):
            if group is not None and self._group_epoch < message.epoch:
                group.abort()
            if forming is not None and forming.epoch < message.epoch:
                abort_group(forming.name)

    def _end_wait(self) -> None:
        channel = self.channel
        if channel is not None:
            channel.wake()

    def progress(self) -> tuple[int, int]:
        """Return the last applied step, and the last step that was applied or has a complete gradient; thread-safe."""
        # The compute thread may apply a step between these reads. `max` keeps the second number >= the first.
        reached = self._machine.applied + self._machine.is_complete
        applied = self._machine.applied
        return applied, max(applied, reached)

    def use_shard_store(self, shard_store: Any) -> None:
        """Switch to another shard store; a wait for samples of the previous shard store ends."""
        if self._samples is not None:
            self._samples.use(shard_store)

    # -- orders ------------------------------------------------------------------------------------------------------

    def open(self, channel: Channel | None) -> None:
        """Switch to this channel; call this through `order`."""
        super().open(channel)
        # Drop tensors of earlier epochs, because the tensors that are still needed are sent again. Keep the
        # gradient sum of a tied parameter, because the protocol machine still counts it as arrived.
        self._arrived = {key: tensor for key, tensor in self._arrived.items() if key[0] == "tied"}

    def equip(self, runner: Runner, samples: ShardSamples, loaded: Loaded) -> None:
        """Switch to this runner; call this through `order`.

        Args:
            runner: runner with the weights.
            samples: provides the samples of the runner's shard.
            loaded: the epoch that is about to begin, and the last step whose update the weights include.
        """
        if self.runner is not None and self._machine.applied == loaded.applied:
            self.copies.former = Legacy.of_runner(self.runner, loaded.applied)
        self.runner, self._samples = runner, samples
        self._arrived.clear()
        self.copier.forget()
        self._handle(loaded)

    def join(self, group: EpochGroup | None, rank: int, epoch: int) -> None:
        """Switch to this process group for the reduction of gradients; call this through `order`.

        Args:
            group: process group of the stage; None if the stage has no other members.
            rank: rank of this member in the group.
            epoch: number of the group's epoch.
        """
        assert self.runner is not None
        with self._news:
            old, self.group = self.group, group
            self.forming, self._group_epoch = None, epoch
        if old is not None:
            leave_group(old)
        self.runner.join(group, rank)

    def arrived(self, step: int, microbatch: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the activation and the gradient that arrived for a microbatch; call this through `order`.

        Each of the two is None if it has not arrived.

        Args:
            step: number of the open step.
            microbatch: id of the microbatch.
        """
        come = self._arrived
        return come.get(("activation", step, microbatch)), come.get(("gradient", step, microbatch))

    # -- the thread --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            try:
                self._work()
            except Exception as failure:  # noqa: BLE001 - the coordinator gets the error
                self._on_failure(failure)
                self._notify(as_reported(failure), None)

    def _work(self, longest_s: float = POLL_S) -> None:
        """Do one piece of work, or wait up to ``longest_s`` seconds for work.

        Priority: messages from the coordinator, effects, calls of other threads, tensors.
        """
        with self._news:
            is_idle = not self._events and not self._effects and not self._orders
            if is_idle and self.channel is None:
                self._news.wait(longest_s)
            event = self._events.popleft() if self._events else None
            is_free = event is None and not self._effects
            order = self._next_order() if is_free else None
        if event is not None:
            self._take_event(event)
        elif self._effects:
            effect = self._effects.popleft()
            try:
                answer = self._carry_out(effect)
            finally:
                if not isinstance(effect, _READS):
                    self.outdate(Outdated.trained)
            if answer is not None:
                self._handle(answer)
        elif order is not None:
            self.outdate(Outdated.everything)  # the order may change parameters, and then compute with them
            self._run_order(order)
            self.outdate(Outdated.everything)
        elif self.channel is not None:
            self._take(longest_s)

    def _take_event(self, event: Event) -> None:
        if isinstance(event, Halt):
            self._clock.stop()
        self._handle(event)

    def _take(self, timeout_s: float) -> None:
        assert self.channel is not None
        taken = self.channel.take(timeout_s)
        if self._outbox.misses(self.channel):
            self._handle(Missed(self.channel.epoch))
        while self.channel.rejected:
            rejected = self.channel.rejected.popleft()
            self._reject(rejected.label, rejected.source, rejected.what)
        if taken is None:
            if time.monotonic() - self._polled_s > _TICK_S:
                self._polled_s = time.monotonic()
                self._handle(RetransmissionTimeout())
            return
        label, source, arrived = taken
        tensor = self._decoded(label, source, arrived)
        if tensor is None:
            return
        if label.cargo == "logged":
            self._handle(Logged(self.channel.epoch, label.step, label.microbatch))
            return
        if label.cargo == "log":
            self._take_log(self.channel, label, tensor)
            return
        place = label.stage if label.cargo == "tied" else label.microbatch
        self._arrived[label.cargo, label.step, place] = tensor
        self._handle(Arrived(self.channel.epoch, label.of_protocol))

    def _decoded(self, label: WireLabel, source: Worker, arrived: Tensor) -> Tensor | None:
        """Return the values of a tensor; if this member cannot use them, reject the tensor and return None."""
        if label.cargo == "logged":
            return arrived
        if label.cargo == "log":
            what = self.copies.misfit(label, arrived)
            if what is not None:
                self._reject(label, source, what)
            return arrived if what is None else None
        expected = self.runner.expected(label.cargo) if self.runner is not None else None
        if expected is None:
            self._reject(label, source, f"nobody waits for the {label.cargo} that it sent")
            return None
        try:
            tensor = decoded(arrived, expected)
        except VerificationFailed as failure:
            self._reject(label, source, f"{described(label)}: {failure.message}")
            return None
        if not expected.has_numbers(tensor):
            self._reject(label, source, f"{described(label)}: its numbers are not finite", is_certain=False)
            return None
        return tensor

    def _reject(self, label: WireLabel, source: Worker, what: str, *, is_certain: bool = True) -> None:
        assert self.channel is not None
        rejected = label if label.is_of_protocol else label._replace(cargo="log")
        self._handle(Misfit(self.channel.epoch, source, rejected.of_protocol, what, is_certain))

    def _take_log(self, channel: Channel, label: WireLabel, tensor: Tensor) -> None:
        """Store one message of a primary's gradient; acknowledge the gradient once all its messages have arrived."""
        followed = self.copies.take(label, tensor)
        if followed is not None:
            self._outbox.acknowledge(channel, followed, label)

    def _handle(self, event: Event) -> None:
        """Pass an event to the protocol machine, and queue the effects that it returns."""
        self._effects.extend(self._machine.handle(event))

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case Compute():
                try:
                    self._run_cell(effect, reduces_inside=not effect.is_checked)
                except ContributorLost:
                    if not effect.slices:
                        raise
                    return ComputeFailed()
                return Computed(effect.action, not effect.is_checked or self._are_finite(effect))
            case Send():
                self._send(effect)
            case Reduce():
                if self.channel is not None and self.group is not None:
                    # The reduction may take long. Receivers need these counts to notice lost tensors.
                    self.channel.report_sent()
                return self._reduce(effect)
            case Apply():
                self._apply(effect)
                return Updated(effect.step)
            case Gather():
                return self._gather()
            case Discard():
                self._runner.discard()
            case Log():
                self._give(effect)
            case SendToCoordinator():
                self._report(effect.message)
        return None

    def _are_finite(self, effect: Compute) -> bool:
        kind = effect.action.kind
        return all(self._runner.is_cell_finite(kind, microbatch) for microbatch in effect.microbatches)

    # -- effects -----------------------------------------------------------------------------------------------------

    @property
    def _runner(self) -> Runner:
        assert self.runner is not None
        return self.runner

    @property
    def _given(self) -> ShardSamples:
        assert self._samples is not None
        return self._samples

    def _run_cell(self, effect: Compute, *, reduces_inside: bool) -> None:
        with self._clock.computing():
            self._compute(effect, reduces_inside=reduces_inside)
            self._runner.finish_cell()

    def _compute(self, effect: Compute, *, reduces_inside: bool) -> None:
        runner, step, microbatch = self._runner, effect.step, effect.action.microbatch
        if not self._clock.is_running:
            self._begin(step)
        if effect.slices:
            self._compute_slices(effect)
            return
        if effect.action.kind == "F":
            entering = self._entering(step, microbatch)
            runner.forward(step, microbatch, entering, keeps_graph=effect.has_backward)
            return
        membership, incoming = self._machine.membership, self._incoming(step, microbatch)
        held = None  # after a halt there is no membership, and no other member would join the reduction
        if effect.is_last and membership is not None and reduces_inside:
            held = self._sums_held(membership, step)
        runner.backward(microbatch, incoming, adds=effect.adds, holders=held)

    def _compute_slices(self, effect: Compute) -> None:
        """Compute cells of slices, together with the other members of the stage."""
        runner, step, membership = self._runner, effect.step, self._machine.membership
        assert isinstance(runner, SliceRunner)
        if membership is None:  # the member was halted meanwhile: no other member would take part
            raise ContributorLost(
                "the epoch of these slices is over", hint="no action needed: the next epoch begins"
            )
        runner.join_ring(membership.holders_of_slices(self._machine.worker))
        if effect.action.kind == "F":
            runner.forward_slices(step, {each: self._entering(step, each) for each in effect.slices})
        else:
            runner.backward_slices({each: self._incoming(step, each) for each in effect.slices})

    def _entering(self, step: int, microbatch: int) -> Tensor:
        """Return the input of a microbatch's forward."""
        with self._clock.waiting():
            found = self._given.input(step, microbatch)
        return self._arrived["activation", step, microbatch] if found is None else found

    def _incoming(self, step: int, microbatch: int) -> Tensor:
        """Return the input of a microbatch's backward."""
        with self._clock.waiting():
            found = self._given.target(step, microbatch)
        return self._arrived["gradient", step, microbatch] if found is None else found

    def _begin(self, step: int) -> None:
        """Start the clock at the first cell of a step, and request the samples of this step and the next one.

        In the second step of an epoch, also start to time the layers.
        """
        self._clock.start()
        membership = self._machine.membership
        if membership is None:
            return
        self._given.expect(membership, self._machine.worker, step)
        if step == membership.step + 1:
            self._runner.start_timing(step)

    def _send(self, effect: Send) -> None:
        assert self.channel is not None
        tensor = self._runner.kept(effect.label.cargo, effect.label.microbatch)
        assert tensor is not None, f"{effect.label} is not kept"
        self._send_output(self.channel, effect, self._runner.encoded(effect.label.cargo, tensor))

    def _send_output(self, channel: Channel, send: Send, tensor: Tensor) -> None:
        channel.send(send.target, WireLabel("train", *send.label), tensor)

    def _reduce(self, effect: Reduce) -> Reduced | ReduceFailed:
        """Sum the gradients of this member's stage, or copy the sum from a member that has it."""
        membership, worker, runner = self._machine.membership, self._machine.worker, self._runner
        if self.group is None:  # the stage has no other members
            runner.reduce([])
            return Reduced()
        if membership is None:  # halted meanwhile
            has_begun = runner.is_reducing
            if has_begun:
                runner.spoil()
            return ReduceFailed(is_spoilt=has_begun)
        place = membership.stage_of(worker)
        has_it = effect.source is not None and worker in membership.reduced[place]
        try:
            if effect.source is None:
                runner.reduce(self._sums_held(membership, effect.step))
            else:
                runner.copy(membership.stages[place].index(effect.source), has_it=has_it)
        except ContributorLost:
            if not has_it:
                runner.spoil()
            return ReduceFailed()
        return Reduced()

    def _gather(self) -> Gathered | GatherFailed:
        """Exchange the updated weights with the other members of the stage."""
        if self._machine.membership is None or self.group is None:  # halted meanwhile
            return GatherFailed()
        try:
            self._runner.gather()
        except ContributorLost:
            return GatherFailed()
        return Gathered()

    def _sums_held(self, membership: Membership, step: int) -> list[tuple[Node, ...]]:
        """Return the tree nodes whose sums each member of this stage holds after its cells of the step.

        The list is ordered by rank.
        """
        stage = membership.stage_of(self._machine.worker)
        return [self._tree.cover(ids) for ids in holders(membership, step, stage)]

    def _give(self, log: Log) -> None:
        """Send the reduced gradient to a backup member or catch-up replica."""
        membership = self._machine.membership
        if membership is None:
            return  # the member was halted meanwhile: the next epoch determines the receiver
        assert self.channel is not None
        self._tie(membership, log.step)
        self.copier.require_still()
        self._outbox.give(self.channel, log, membership.stage_of(self._machine.worker), self._runner)

    def _apply(self, effect: Apply) -> None:
        self._runner.apply(effect.step, effect.scale, effect.rate)
        self._arrived = {key: tensor for key, tensor in self._arrived.items() if key[1] > effect.step}
        self._given.forget(effect.step)
        if self.channel is not None:
            self.channel.forget(effect.step)

    def _tie(self, membership: Membership, step: int) -> None:
        """Add the other stage's gradient sum of the tied parameter, if the sum has arrived.

        Repeated calls add it only once.
        """
        other = len(membership.stages) - 1 - membership.stage_of(self._machine.worker)
        theirs = self._arrived.get(("tied", step, other))
        if membership.is_tied and theirs is not None:
            self._runner.tie(theirs)

    def _report(self, message: ToCoordinator) -> None:
        """Send a message to the coordinator; add to `Prepared` the fields that only the runner knows."""
        if not isinstance(message, Prepared):
            self._notify(message, None)
            return
        runner, membership = self._runner, self._machine.membership
        if membership is None:
            return  # the member was halted meanwhile: the message belongs to an epoch that is over
        self._tie(membership, message.step)
        spent = self._clock.read()
        figures = StepFigures(
            targets=runner.targets_per_microbatch,
            seconds=spent.seconds,
            waited_s=spent.waited_s,
            layer_timings=runner.layer_timings(message.step),
        )
        # After a restart of a step, digests are compared with earlier digests, even in a stage of one member.
        has_whole = runner.gradients.share.total == 1  # members with different shares cannot compare digests
        is_compared = has_whole and (self.group is not None or self._machine.generation > 0)
        prepared = replace(
            message,
            squared_norms=runner.squared_norms(),
            losses=runner.losses(),
            digest=runner.gradients.digest() if is_compared else "",
        )
        self._notify(prepared, figures)


def described(label: WireLabel) -> str:
    """Return a description of a tensor, for messages about it."""
    if label.cargo == "tied":
        return "the gradient of a shared parameter"
    return f"the {label.cargo} of microbatch {label.microbatch}"
