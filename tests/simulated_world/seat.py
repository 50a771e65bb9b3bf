"""A coordinator of the simulated world: carries out the effects of its state machine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.simulated_world.network import Action
from tests.simulated_world.process import Process

from share_compute.protocol.coordinator import (
    Blame,
    Committed,
    CoordinatorMachine,
    Disputed,
    Diverged,
    Effect,
    Event,
    Expel,
    MembershipInfeasible,
    MembershipPlanned,
    Pause,
    PlanMembership,
    SendToMember,
    StartOver,
    Suspect,
    WriteStepLog,
)
from share_compute.protocol.messages import Form, ToCoordinator
from share_compute.protocol.points import RECEIVED, SENDING, Point

if TYPE_CHECKING:
    from tests.simulated_world.world import World


class Seat(Process):
    """One coordinator, from its start to its death.

    Args:
        name: name of the coordinator in the network.
        world: world of the coordinator.
        machine: state machine of the coordinator.
    """

    def __init__(self, name: str, world: World, machine: CoordinatorMachine) -> None:
        super().__init__(name, world, None)
        self.machine = machine
        self._form: Form | None = None

    @property
    def open_step(self) -> int:
        """Step that the coordinator works on."""
        return self.machine.committed + 1

    @property
    def is_over(self) -> bool:
        """Whether the coordinator is dead or was superseded."""
        return not self.is_alive or self.machine.phase == "over"

    def receive(self, message: ToCoordinator) -> None:
        """Take a message of a member from the network."""
        self.push(self._passing(RECEIVED[type(message)]))
        self.push(lambda: self._handle(message))

    def order(self, event: Event) -> None:
        """Take an event that is not a message of a member."""
        self.push(lambda: self._handle(event))

    def _handle(self, event: Event) -> None:
        self._first(action for effect in self.machine.handle(event) for action in self._actions(effect))

    def _actions(self, effect: Effect) -> list[Action]:  # noqa: PLR0911 - a return for each effect
        match effect:
            case WriteStepLog():
                point = Point.epoch_recording if effect.step is None else Point.step_recording
                return [self._passing(point), lambda: self._record(effect)]
            case PlanMembership():
                return [self._passing(Point.planning), lambda: self._plan(effect)]
            case SendToMember():
                return self._notify(effect)
            case Committed():
                return [lambda: self._world.on_committed(self, effect)]
            case Blame():
                return [lambda: self._world.on_blamed(self, effect)]
            case Expel():
                return [lambda: self._world.on_expelled(self, effect.worker)]
            case Diverged() | Disputed():
                return [lambda: self._world.on_hopeless(effect)]
            case Suspect():
                return [lambda: self._world.on_believed(self, effect)]
            case StartOver():
                return []
            case Pause():
                return [self._passing(Point.pausing), lambda: self._world.on_pause(self, effect.step)]

    def _notify(self, notice: SendToMember) -> list[Action]:
        if isinstance(notice.message, Form):
            self._form = notice.message

        def deliver() -> None:
            self._world.hosts[notice.worker].receive(notice.message)

        return self._sending(SENDING[type(notice.message)], notice.worker, deliver)

    def _record(self, record: WriteStepLog) -> None:
        """Write after a delay, and report the answer after another delay, even if this process is dead by then."""
        world = self._world
        if record.step is not None:
            assert self._form is not None
            world.checks.before_commit(self._form.membership, record, self.machine.prepared, world.hosts)
        point = Point.epoch_recorded if record.step is None else Point.step_recorded

        def write() -> None:
            answer = world.write(record)
            self.push(self._passing(point))
            world.clock.after(world.random.random(), partial(self.order, answer))

        world.clock.after(world.random.random(), write)

    def _plan(self, plan: PlanMembership) -> None:
        def finish() -> None:
            form = self._world.planner.answer(plan)
            self.push(self._passing(Point.planned))
            self.order(MembershipInfeasible(plan.epoch) if form is None else MembershipPlanned(form))

        self._world.clock.after(2.0 * self._world.random.random(), lambda: self.push(finish))
