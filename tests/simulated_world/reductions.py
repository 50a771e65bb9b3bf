"""Collective operations of a stage: all members get the result, or some get it and others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from tests.simulated_world.network import Clock
from tests.simulated_world.symbols import Gradient, SymbolicModel, Weights

from share_compute.protocol.member_events import Gathered, GatherFailed, Reduced, ReduceFailed
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


AnswerGather = Callable[[Gathered | GatherFailed, Weights], None]
"""Callback that takes the outcome of an exchange, and the weights that arrived."""


class Exchange:
    """One exchange of updated weights between the members of one stage.

    Args:
        members: members that must take part.
        clock: source of the simulated time.
        random: generator for times, and for the weights that arrive although a peer is gone.
    """

    def __init__(self, members: tuple[Worker, ...], clock: Clock, random: Random) -> None:
        self._members = members
        self._clock = clock
        self._random = random
        self._weights: dict[Worker, Weights] = {}
        self._answers: dict[Worker, AnswerGather] = {}
        self._is_broken = False
        clock.after(DEADLINE_S, self._end_unless_whole)

    def enter(self, worker: Worker, own: Weights, answer: AnswerGather) -> None:
        """Take part with the weights of the own share."""
        self._weights[worker] = own
        self._answers[worker] = answer
        if self._is_broken:
            self._fail(worker)
        elif len(self._weights) == len(self._members):
            for member in self._members:
                self._answer_later(member, Gathered(), self._members)

    def leave(self, worker: Worker) -> None:
        """End the exchange since a member died or was halted. Each other member may have got any weights."""
        if worker not in self._members or self._is_broken:
            return
        self._is_broken = True
        for member in tuple(self._answers):
            self._fail(member)

    def _fail(self, worker: Worker) -> None:
        arrived = [
            member for member in self._members if member in self._weights and self._random.random() < 0.5
        ]
        self._answer_later(worker, GatherFailed(), arrived)

    def _end_unless_whole(self) -> None:
        if len(self._weights) < len(self._members):
            self.leave(self._members[0])

    def _answer_later(
        self, worker: Worker, ended: Gathered | GatherFailed, sources: Iterable[Worker]
    ) -> None:
        arrived = {layer: value for source in sources for layer, value in self._weights[source].items()}

        def answer() -> None:
            if worker in self._answers:
                self._answers.pop(worker)(ended, arrived)

        self._clock.after(self._random.random(), answer)
