"""A member's one compute thread: it carries out what the protocol's machine wants, and orders from outside, in turn.

Everything that touches weights, gradients or the channel happens on this thread. Other threads only leave messages and
orders here, and end waits that have become pointless.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from share_compute.errors import ContributorLost, ShareComputeError
from share_compute.protocol.cells import holders
from share_compute.protocol.failures import FailureKind
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import (
    Apply,
    Arrived,
    Compute,
    Computed,
    Discard,
    Effect,
    Event,
    Loaded,
    Log,
    Reduce,
    Reduced,
    ReduceFailed,
    Send,
    Tell,
    Tick,
    Updated,
)
from share_compute.protocol.messages import (
    Applied,
    Broken,
    Commit,
    Form,
    Formed,
    Halt,
    Prepared,
    Proceed,
    Report,
    ToCoordinator,
    ToMember,
)
from share_compute.protocol.messages import Label as ProtocolLabel
from share_compute.protocol.points import Point
from share_compute.protocol.tree import Node, SummationTree
from share_compute_actors.channel import Channel
from share_compute_actors.collective import EpochGroup, abort_group, leave_group
from share_compute_actors.messages import Label, StepFigures
from share_compute_actors.rows import Rows
from share_compute_actors.runner import Runner
from share_compute_actors.testing import Injector

_TICK_S = 5.0
"""Time after which a buddy that has not answered is given the gradient once more."""
_GLANCE_S = 1.0
"""Longest wait for a tensor before the thread looks up; messages and orders wake it at once."""

_SENDING = {
    Report: Point.report_sending,
    Formed: Point.formed_sending,
    Prepared: Point.prepared_sending,
    Broken: Point.broken_sending,
    Applied: Point.applied_sending,
}
_HEARD = {
    Halt: Point.halt_heard,
    Form: Point.form_heard,
    Commit: Point.commit_heard,
    Proceed: Point.proceed_heard,
}

Result = TypeVar("Result")


class Forming(NamedTuple):
    """A group that is being formed."""

    epoch: int
    name: str


TellCoordinator = Callable[[ToCoordinator | ShareComputeError, StepFigures | None], None]


class Engine:
    """One member's compute thread.

    Args:
        machine: its side of the protocol.
        tree: the order in which gradients are added.
        tell: takes what the coordinator must hear, from the compute thread.
        injector: lets things go wrong in tests.
    """

    def __init__(
        self, machine: MemberMachine, tree: SummationTree, tell: TellCoordinator, injector: Injector
    ) -> None:
        self._machine = machine
        self._tree = tree
        self._tell = tell
        self._injector = injector
        self.runner: Runner | None = None
        self.channel: Channel | None = None
        self.group: EpochGroup | None = None
        self.forming: Forming | None = None
        """The group that this member is about to join, if it is."""
        self._group_epoch = 0
        self._inputs: Rows | None = None
        self._targets: Rows | None = None
        self._arrived: dict[tuple[str, int, int], Tensor] = {}
        """What came over boundaries, by cargo, step and microbatch; of a tied parameter by cargo, step and pool."""
        self._events: deque[Event] = deque()
        self._effects: deque[Effect] = deque()
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._began_s = 0.0
        self._computed_s = 0.0
        self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="compute", daemon=True)
        self._thread.start()

    # -- from other threads ------------------------------------------------------------------------------------------

    def hear(self, message: ToMember) -> None:
        """Take in what the coordinator says; a halt also ends waits of the epoch that is over."""
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

    def order(self, work: Callable[[], Result]) -> Result:
        """Run something on the compute thread, and return what it returns."""
        future: Future[Result] = Future()
        with self._news:
            self._orders.append((work, future))
            self._news.notify()
            channel = self.channel
        if channel is not None:
            channel.wake()
        return future.result()

    # -- orders ------------------------------------------------------------------------------------------------------

    def open(self, channel: Channel) -> None:
        """Talk through this channel from now on; an order."""
        with self._lock:
            old, self.channel = self.channel, channel
        if old is not None:
            old.close()
        # What is still needed is sent again, but for the sum of a parameter that two pools share.
        self._arrived = {key: tensor for key, tensor in self._arrived.items() if key[0] == "tied"}

    def equip(self, runner: Runner, inputs: Rows, targets: Rows, loaded: Loaded) -> None:
        """Compute with this runner from now on; an order.

        Args:
            runner: has the weights.
            inputs: samples of the first pool.
            targets: those of the last.
            loaded: says which step's update the weights have.
        """
        self.runner, self._inputs, self._targets = runner, inputs, targets
        self._arrived.clear()
        self._passes(Point.weights_loaded)
        self._handle(loaded)

    def join(self, group: EpochGroup | None, rank: int, epoch: int) -> None:
        """Sum gradients with this group from now on; an order."""
        assert self.runner is not None
        with self._lock:
            old, self.group = self.group, group
            self.forming, self._group_epoch = None, epoch
        if old is not None:
            leave_group(old)
        self.runner.join(group, rank)

    def arrived(self, step: int, microbatch: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the activation and the gradient that came over the shard's boundaries in the open step; an order."""
        come = self._arrived
        return come.get(("activation", step, microbatch)), come.get(("gradient", step, microbatch))

    # -- the thread --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            try:
                self._turn()
            except ShareComputeError as failure:
                self._tell(failure, None)
            except Exception as failure:  # noqa: BLE001 - it is told, and ends the attempt
                self._tell(
                    ShareComputeError(
                        f"{type(failure).__name__}: {failure}",
                        mend="look at the job's log; if the cause is not yours, report it",
                    ),
                    None,
                )

    def _turn(self) -> None:
        """Do one thing: what was told goes before what is to be done, and that before orders and tensors."""
        with self._news:
            is_idle = not self._events and not self._effects and not self._orders
            if is_idle and self.channel is None:
                self._news.wait()
            event = self._events.popleft() if self._events else None
            is_free = event is None and not self._effects
            order = self._orders.popleft() if is_free and self._orders else None
        if event is not None:
            if type(event) in _HEARD:
                self._passes(_HEARD[type(event)])
            if isinstance(event, Halt):
                self._began_s = 0.0  # what follows is waiting for the next epoch, not work
            self._handle(event)
        elif self._effects:
            answer = self._carry_out(self._effects.popleft())
            if answer is not None:
                self._handle(answer)
        elif order is not None:
            _run(*order)
        elif self.channel is not None:
            self._take()

    def _take(self) -> None:
        assert self.channel is not None
        taken = self.channel.take(_GLANCE_S)
        if taken is None:
            if time.monotonic() - self._looked_s > _TICK_S:
                self._looked_s = time.monotonic()
                self._handle(Tick())
            return
        label, tensor = taken
        self._passes(Point.tensor_heard)
        place = label.pool if label.cargo == "tied" else label.microbatch
        self._arrived[label.cargo, label.step, place] = tensor
        self._handle(Arrived(self.channel.epoch, protocol_label(label)))

    def _handle(self, event: Event) -> None:
        """Let the machine take in an event; what follows is done turn by turn, so that a halt is heard in between."""
        self._effects.extend(self._machine.handle(event))

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case Compute():
                self._passes(Point.cell_starting)
                start = time.perf_counter()
                self._compute(effect)
                self._computed_s += time.perf_counter() - start
                self._passes(Point.cell_done)
                return Computed(effect.action)
            case Send():
                self._send(effect)
            case Reduce():
                self._passes(Point.reduce_starting)
                return self._reduce(effect)
            case Apply():
                self._passes(Point.apply_starting)
                self._apply(effect)
                self._passes(Point.apply_done)
                return Updated(effect.step)
            case Discard():
                self._runner.discard()
            case Log():
                raise AssertionError("no roster names buddies yet")
            case Tell():
                self._report(effect.message)
        return None

    def _passes(self, point: Point) -> frozenset[FailureKind]:
        return self._injector.passes(point, self._machine.applied + 1)

    # -- effects -----------------------------------------------------------------------------------------------------

    @property
    def _runner(self) -> Runner:
        assert self.runner is not None
        return self.runner

    def _compute(self, effect: Compute) -> None:
        runner, step, microbatch = self._runner, effect.step, effect.action.microbatch
        if not self._began_s:
            self._begin(step)
        if effect.action.kind == "F":
            if runner.stage.shard.is_first:
                assert self._inputs is not None
                entering = self._inputs.take(step, microbatch)
            else:
                entering = self._arrived["activation", step, microbatch]
            runner.forward(step, microbatch, entering, keeps_graph=effect.has_backward)
            return
        if runner.stage.shard.is_last:
            assert self._targets is not None
            incoming = self._targets.take(step, microbatch)
        else:
            incoming = self._arrived["gradient", step, microbatch]
        runner.backward(
            microbatch,
            incoming,
            adds=effect.adds,
            # Halted meanwhile, nobody would wait for a reduction that began inside.
            holders=self._holders(step) if effect.is_last and self._machine.roster is not None else None,
        )

    def _begin(self, step: int) -> None:
        """At the first cell of a step: note the time, and ask for samples of this step and the next."""
        self._began_s = time.perf_counter()
        roster = self._machine.roster
        if roster is None:
            return
        pool = roster.pool_of(self._machine.worker)
        shard = self._runner.stage.shard
        for number in (step, step + 1):
            own = [
                microbatch
                for microbatch, task in enumerate(roster.tasks_of(number)[pool])
                if task.worker == self._machine.worker and (task.forward or task.backward)
            ]
            if shard.is_first and self._inputs is not None:
                self._inputs.expect(number, own)
            if shard.is_last and self._targets is not None:
                self._targets.expect(number, own)
        if step == roster.step + 1:
            self._runner.start_timing(step)

    def _send(self, effect: Send) -> None:
        assert self.channel is not None
        tensor = self._runner.kept(effect.label.cargo, effect.label.microbatch)
        assert tensor is not None, f"{effect.label} is not kept"
        kinds = self._passes(Point.tensor_sending)
        for _ in range(2 if FailureKind.duplicate in kinds else 1):
            self.channel.send(effect.target, Label("train", *effect.label), tensor)

    def _holders(self, step: int) -> list[tuple[Node, ...]]:
        """Return which sums each member of the pool holds at the end of the step."""
        roster = self._machine.roster
        assert roster is not None
        pool = roster.pool_of(self._machine.worker)
        return [self._tree.cover(ids) for ids in holders(roster, step, pool)]

    def _reduce(self, effect: Reduce) -> Event:
        roster, me = self._machine.roster, self._machine.worker
        if roster is None and self.group is not None:
            has_begun = self._runner.is_reducing
            if has_begun:
                self._runner.spoil()
            return ReduceFailed(is_spoilt=has_begun)
        place = roster.pool_of(me) if roster is not None else 0
        has_it = roster is not None and effect.source is not None and me in roster.reduced[place]
        try:
            if roster is None or self.group is None:
                self._runner.reduce([])
            elif effect.source is None:
                self._runner.reduce(self._holders(effect.step))
            else:
                self._runner.copy(roster.pools[place].index(effect.source), has_it=has_it)
        except ContributorLost:
            if not has_it:
                self._runner.spoil()
            self._passes(Point.reduce_failed)
            return ReduceFailed()
        self._passes(Point.reduce_done)
        return Reduced()

    def _apply(self, effect: Apply) -> None:
        self._runner.apply(effect.step, effect.scale)
        self._arrived = {key: tensor for key, tensor in self._arrived.items() if key[1] > effect.step}
        for rows in (self._inputs, self._targets):
            if rows is not None:
                rows.forget(effect.step)
        if self.channel is not None:
            self.channel.forget(effect.step)

    def _report(self, message: ToCoordinator) -> None:
        """Tell the coordinator; to `Prepared` add what only the runner knows."""
        self._passes(_SENDING[type(message)])
        if not isinstance(message, Prepared):
            self._tell(message, None)
            return
        runner, roster = self._runner, self._machine.roster
        if roster is None:
            return  # halted meanwhile: nobody waits for it
        other = len(roster.pools) - 1 - roster.pool_of(self._machine.worker)
        theirs = self._arrived.get(("tied", message.step, other))
        if roster.is_tied and theirs is not None:
            runner.tie(theirs)
        computed_s = self._computed_s
        seconds = time.perf_counter() - self._began_s if self._began_s else computed_s
        figures = StepFigures(
            targets=runner.targets_per_microbatch,
            seconds=seconds,
            waited_s=max(0.0, seconds - computed_s),
            layer_timings=runner.layer_timings(message.step),
        )
        self._began_s = self._computed_s = 0.0
        self._tell(replace(message, squared_norms=runner.squared_norms(), losses=runner.losses()), figures)


def protocol_label(label: Label) -> ProtocolLabel:
    """Return what the protocol calls a tensor that came over the channel."""
    assert label.cargo != "hello"
    return ProtocolLabel(label.step, label.cargo, label.microbatch, label.pool)


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as failure:  # noqa: BLE001 - who ordered it is told
        future.set_exception(failure)
