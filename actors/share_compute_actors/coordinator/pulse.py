"""Who is alive: members are asked for a sign of life now and then, and who owes one for too long is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from share_compute.errors import ShareComputeError
from share_compute.protocol.roster import Worker
from share_compute_actors.member.answering import answered
from share_compute_actors.unpickling import is_refusal
from share_compute_actors.wire import Packs, Undeclared, undeclared

_PERIOD_S = 0.5
"""Time between two questions."""
_SILENCE_S = 2.0
"""A member that owes a sign of life for so long is lost."""
_WORRIED_SILENCE_S = 0.7
"""The same once something went wrong: most likely somebody is gone, and all others wait for this. Members answer from a
thread that does nothing else, with all cores busy within a fraction of it."""
_WORRY_S = 5.0
"""Who is gone is known after less time than this; then patience is as before, since a step may take longer."""
_PATIENT_SILENCE_S = 30.0
"""The same while members load: that may hold Python's lock for long."""
_RETURN_S = 8.0
"""The same after the network was cut: TCP may take as long as the cut to send again what was lost."""
_LATE_S = 0.5
"""When this process itself was held up for so long, silence says nothing."""


class Pulse:
    """Signs of life of a crew, as its coordinator asks for them.

    Args:
        schema: of a sign of life.
        name: tells the name of a member's machine.
    """

    def __init__(self, schema: Packs[Any], name: Callable[[Worker], str]) -> None:
        self._schema = schema
        self._name = name
        self._accused: set[Worker] = set()
        self._faults: dict[Worker, str] = {}
        self._is_patient = True
        self.silent: frozenset[Worker] = frozenset()
        """Members that the last look found lost only because nothing came from them."""
        self.signs: dict[Worker, Any] = {}
        """The last sign of life of each member."""
        self._fresh: dict[Worker, Any] = {}
        """Those of them that were not taken yet."""
        self.returning: frozenset[Worker] = frozenset()
        """Members that have not answered since the network of this host came back."""
        self._owed: dict[Any, Worker] = {}
        self._asked_s = self._looked_s = time.monotonic()
        self._worried_until_s = self._returning_until_s = 0.0
        self._asks_at_once = False

    @property
    def is_patient(self) -> bool:
        """While members load, which may hold Python's lock for long, they may be silent for longer."""
        return self._is_patient

    @is_patient.setter
    def is_patient(self, is_patient: bool) -> None:
        if self._is_patient and not is_patient:
            self._asked_s = time.monotonic()  # who was silent with leave gets as long as the others
        self._is_patient = is_patient

    def worry(self) -> None:
        """Something went wrong: ask everybody at once, and be less patient for a while, or until `calm`."""
        now_s = time.monotonic()
        if now_s > self._worried_until_s:
            self._worried_until_s = now_s + _WORRY_S
            self._asks_at_once = True
            self._asked_s = now_s  # who owes a sign already gets as long as the others

    def accuse(self, worker: Worker, failure: Exception) -> None:
        """Count a member as lost from the next look on: what it sent shows that it is not what it should be."""
        self._accused.add(worker)
        self._faults[worker] = _fault(failure, self._name(worker))

    def take_fault(self, worker: Worker) -> str:
        """Return, once, what a member was accused of; nothing if it was not."""
        return self._faults.pop(worker, "")

    def take_fresh(self) -> dict[Worker, Any]:
        """Return, once, each member's last sign of life, if one came since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def begin_anew(self, workers: Collection[Worker]) -> None:
        """The network is back: forget who owes a sign of life, and be patient with these until each has answered."""
        self.returning = frozenset(workers)
        self._owed.clear()
        self._asks_at_once = True
        self._asked_s = time.monotonic()
        self._returning_until_s = self._asked_s + _RETURN_S

    def calm(self) -> None:
        """All goes well again."""
        self._worried_until_s = 0.0

    def forget_all_but(self, workers: Collection[Worker]) -> None:
        """Expect nothing of others than these."""
        self._owed = {ref: worker for ref, worker in self._owed.items() if worker in workers}
        self.signs = {worker: sign for worker, sign in self.signs.items() if worker in workers}
        self._fresh = {worker: sign for worker, sign in self._fresh.items() if worker in workers}
        self.returning = self.returning.intersection(workers)

    def feel(self, actors: Mapping[Worker, Any]) -> frozenset[Worker]:
        """Ask these members now and then; return who is dead, or owes a sign of life for too long."""
        self.silent = frozenset()
        accused, self._accused = self._accused & actors.keys(), set()
        if accused:
            return frozenset(accused)
        now_s = time.monotonic()
        late_s, self._looked_s = now_s - self._looked_s, now_s
        if late_s > _LATE_S:
            self._asked_s += late_s
        if self._owed:
            ready, owing = ray.wait(list(self._owed), num_returns=len(self._owed), timeout=0)
            lost = {self._owed[ref] for ref in ready if not self._take(ref)}
            if now_s < self._returning_until_s and (returning := lost & self.silent & self.returning):
                # Ray needs a moment to connect again after a cut, and fails calls until then: ask these again.
                lost -= returning
                self.silent -= returning
                self._owed = {ref: self._owed[ref] for ref in owing}
                self._owed |= {
                    actors[worker].status.remote(): worker for worker in returning if worker in actors
                }
                owing = list(self._owed)
            if owing and now_s - self._asked_s > self._longest_silence_s(now_s):
                silent = {self._owed[ref] for ref in owing}
                self.silent |= silent
                lost |= silent
            if lost:
                return frozenset(lost)
            if owing or (now_s - self._asked_s < _PERIOD_S and not self._asks_at_once):
                return frozenset()
        self._asks_at_once = False
        self._owed = {actor.status.remote(): worker for worker, actor in actors.items()}
        self._asked_s = now_s
        return frozenset()

    def _take(self, ref: Any) -> bool:
        return self.gives_sign(self._owed[ref], ref)

    def gives_sign(self, worker: Worker, ref: Any) -> bool:
        """Take in an answer of a member; return whether it is a sign of its life."""
        try:
            sign = answered(self._schema, ref, self._name(worker))
            if sign.worker != worker:
                raise undeclared(self._name(worker), "a sign of life of another member")
        except (RayError, ShareComputeError) as failure:
            if isinstance(failure, Undeclared) or is_refusal(failure):
                self._faults[worker] = _fault(failure, self._name(worker))
            elif isinstance(failure, ActorUnavailableError):
                self.silent |= {worker}
            return False
        self.signs[worker] = self._fresh[worker] = sign
        self.returning -= {worker}
        return True

    def _longest_silence_s(self, now_s: float) -> float:
        if self.is_patient:
            return _PATIENT_SILENCE_S
        if self.returning and now_s < self._returning_until_s:
            return _RETURN_S
        return _WORRIED_SILENCE_S if now_s < self._worried_until_s else _SILENCE_S


def _fault(failure: Exception, machine: str) -> str:
    if isinstance(failure, ShareComputeError):
        return failure.message
    return undeclared(machine, "a pickle, or an error that cannot be read").message
