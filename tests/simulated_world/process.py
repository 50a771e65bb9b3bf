"""A process of the simulated world: it runs one action after the other, and can be stopped or killed between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tests.simulated_world.network import Action

from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.membership import Worker
from share_compute.protocol.points import Point

if TYPE_CHECKING:
    from tests.simulated_world.world import World


class Process:
    """One process.

    Args:
        name: name of the process in the network.
        world: world of the process.
        worker: name of its member; None for a coordinator.
    """

    def __init__(self, name: str, world: World, worker: Worker | None) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self._world = world
        self._worker = worker
        self._todo: deque[Action] = deque()
        self._is_busy = False

    @property
    def open_step(self) -> int:
        """Step that the process works on."""
        raise NotImplementedError

    def push(self, action: Action) -> None:
        """Queue an action behind all others of the process."""
        self._todo.append(action)
        self._go_on()

    def kill(self) -> None:
        """End the process."""
        self.is_alive = False
        self._todo.clear()
        self._world.on_death(self)

    def stop(self, duration_s: float) -> None:
        """Stall the process for ``duration_s`` seconds."""
        self.is_stopped = True
        self._world.clock.after(duration_s, self._thaw)

    def _thaw(self) -> None:
        self.is_stopped = False
        self._go_on()

    def _go_on(self) -> None:
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._todo and self.is_alive and not self.is_stopped:
                self._todo.popleft()()
        finally:
            self._is_busy = False

    def _first(self, actions: Iterable[Action]) -> None:
        """Queue these actions before all others."""
        self._todo.extendleft(reversed(list(actions)))

    def _pass(self, point: Point) -> list[InjectedFailure]:
        """Pass a point, and return the failures of a message that leaves here."""
        of_message = []
        for failure in self._world.passes(point, self._worker, self.open_step):
            match failure.kind:
                case FailureKind.kill:
                    if self._world.may_die(self):
                        self.kill()
                case FailureKind.stop:
                    self.stop(failure.duration_s)
                case _ if failure.kind.is_offence and self._worker is not None:
                    self._world.culprits.add(self._worker)
                    of_message.append(failure)
                case FailureKind.partition:
                    self._world.network.cut(self.name, failure.peers, failure.duration_s)
                case _:
                    of_message.append(failure)
        return of_message

    def _passing(self, point: Point) -> Action:
        """Return an action that passes a point."""
        return lambda: self._pass_quietly(point)

    def _pass_quietly(self, point: Point) -> None:
        self._pass(point)

    def _sending(
        self,
        point: Point,
        target: str,
        deliver: Callable[[], None],
        missed: Action | None = None,
        failures: list[InjectedFailure] | None = None,
    ) -> list[Action]:
        """Return actions that pass a point and then send a message, whose loss the receiver may notice.

        Failures of the message are added to ``failures``.
        """
        failures = [] if failures is None else failures
        return [
            lambda: failures.extend(self._pass(point)),
            lambda: self._world.network.send(self.name, target, deliver, failures, missed),
        ]
