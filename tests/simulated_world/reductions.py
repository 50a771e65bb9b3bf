"""Reductions of a stage: all members get the sum, or some get it and others lose their input."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.simulated_world.network import Clock
from tests.simulated_world.symbols import Gradient, SymbolicModel

from share_compute.protocol.member_events import Reduced, ReduceFailed
from share_compute.protocol.membership import Worker
from share_compute.protocol.tree import Node

DEADLINE_S = 25.0
"""Time in seconds after which a reduction with a missing member ends without a result."""
Answer = Callable[[Reduced | ReduceFailed, Gradient | None], None]
"""Callback that takes the outcome of a reduction, and the sum if there is one."""


class Reduction:
    """One reduction of one stage.

    Args:
        members: members that must take part.
        source: member that already has the sum and gives it to the others; None: all bring their parts.
        model: model that adds the gradients.
        clock: source of the simulated time.
        random: generator for the time at which each member has its result, and for results that come although a peer is
            gone.
    """

    def __init__(
        self,
        members: tuple[Worker, ...],
        source: Worker | None,
        model: SymbolicModel,
        clock: Clock,
        random: Random,
    ) -> None:
        self._members = members
        self._source = source
        self._model = model
        self._clock = clock
        self._random = random
        self._parts: dict[Worker, dict[Node, Gradient]] = {}
        self._answers: dict[Worker, Answer] = {}
        self._sum: Gradient | None = None
        self._is_broken = False
        clock.after(DEADLINE_S, self._end_unless_whole)

    def enter(
        self, worker: Worker, parts: dict[Node, Gradient], reduced: Gradient | None, answer: Answer
    ) -> None:
        """Take part with the gradients that were added up, or with the sum if this member is the source."""
        self._parts[worker] = parts
        self._answers[worker] = answer
        if worker == self._source:
            assert reduced is not None
            self._sum = reduced
        if self._is_broken:
            self._answer_later(worker, ReduceFailed(is_spoilt=False))
        elif len(self._parts) == len(self._members):
            if self._source is None:
                self._sum = self._model.whole(self._parts[member] for member in self._members)
            for member in self._members:
                self._answer_later(member, Reduced())

    def leave(self, worker: Worker) -> None:
        """End the reduction since a member died or was halted. Members without a result may get none."""
        if worker not in self._members or self._is_broken:
            return
        is_whole = len(self._parts) == len(self._members)
        self._is_broken = True
        for member in tuple(self._answers):
            gets_it = is_whole and self._random.random() < 0.5
            self._answer_later(member, Reduced() if gets_it else ReduceFailed(is_spoilt=is_whole))

    def _end_unless_whole(self) -> None:
        if len(self._parts) < len(self._members):
            self.leave(self._members[0])

    def _answer_later(self, worker: Worker, ended: Reduced | ReduceFailed) -> None:
        def answer() -> None:
            if worker in self._answers:
                self._answers.pop(worker)(ended, self._sum)

        self._clock.after(self._random.random(), answer)
