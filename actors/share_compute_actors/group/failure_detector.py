"""The failure detector: requests heartbeats from members, and counts a member as lost if its heartbeat is overdue."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from share_compute.errors import ShareComputeError
from share_compute.protocol.membership import Worker
from share_compute_actors.group.answering import answered
from share_compute_actors.unpickling import is_refusal
from share_compute_actors.wire import Packs, Undeclared, undeclared

_PERIOD_S = 0.5
"""Time between two rounds of heartbeat requests, in seconds."""
_LIMIT_S = 2.0
"""Normal time limit for the answer to a heartbeat request, in seconds; a member that exceeds it is lost."""
_SHORT_LIMIT_S = 0.7
"""Time limit for a heartbeat after an error, in seconds. It is short because the other members wait for the result."""
_SHORTENED_S = 5.0
"""Longest time for which the shorter limit applies, in seconds."""
_LOADING_LIMIT_S = 30.0
"""Time limit for a heartbeat while members load shards, in seconds: loading may hold the global interpreter lock."""
_RETURN_LIMIT_S = 8.0
"""Time limit for a heartbeat after a network cut, in seconds: TCP retransmits lost data with exponential backoff."""
_LATE_S = 0.5
"""Longest normal time between two calls of `poll`, in seconds. A longer time does not count towards the members' time
limits, because this process itself was delayed."""


class FailureDetector:
    """Failure detector of a group of members.

    Args:
        schema: schema of a heartbeat.
        name: returns the name of a member's machine.
    """

    def __init__(self, schema: Packs[Any], name: Callable[[Worker], str]) -> None:
        self._schema = schema
        self._name = name
        self._accused: set[Worker] = set()
        self._faults: dict[Worker, str] = {}
        self._are_loading = True
        self.unresponsive: frozenset[Worker] = frozenset()
        """Members that the last call of `poll` counted as lost only because they are unresponsive."""
        self.heartbeats: dict[Worker, Any] = {}
        """Last heartbeat of each member."""
        self._new: dict[Worker, Any] = {}
        """Heartbeats that `take_new_heartbeats` has not returned yet."""
        self.returning: frozenset[Worker] = frozenset()
        """Members that have not answered since the network of this host came back."""
        self._owed: dict[Any, Worker] = {}
        self._requested_s = self._polled_s = time.monotonic()
        self._shortened_until_s = self._returning_until_s = 0.0
        self._requests_at_once = False

    @property
    def are_loading(self) -> bool:
        """Whether members are loading shards. If so, the time limit for a heartbeat is 30 s."""
        return self._are_loading

    @are_loading.setter
    def are_loading(self, are_loading: bool) -> None:
        if self._are_loading and not are_loading:
            self._requested_s = time.monotonic()  # pending requests get the normal limit from now on
        self._are_loading = are_loading

    def shorten_limit(self) -> None:
        """Shorten the normal time limit to 0.7 s, for 5 s or until `reset_limit`.

        Call this method after an error that a lost member may have caused. Further calls within the 5 s do nothing.
        """
        now_s = time.monotonic()
        if now_s > self._shortened_until_s:
            self._shortened_until_s = now_s + _SHORTENED_S
            self._requests_at_once = True
            self._requested_s = now_s  # pending requests get the shorter limit from now on

    def accuse(self, worker: Worker, failure: Exception) -> None:
        """Make the next call of `poll` return this member as lost, because it sent invalid data."""
        self._accused.add(worker)
        self._faults[worker] = _fault(failure, self._name(worker))

    def take_fault(self, worker: Worker) -> str:
        """Return and forget the description of the invalid data that a member sent; empty if there is none."""
        return self._faults.pop(worker, "")

    def take_new_heartbeats(self) -> dict[Worker, Any]:
        """Return the last heartbeat of each member that sent one since the previous call of this method, by member."""
        new, self._new = self._new, {}
        return new

    def restart(self, workers: Collection[Worker]) -> None:
        """Restart after a network cut: forget pending heartbeat requests, and apply a longer limit.

        The longer limit applies until these members have answered, for 8 s at most.
        """
        self.returning = frozenset(workers)
        self._owed.clear()
        self._requests_at_once = True
        self._requested_s = time.monotonic()
        self._returning_until_s = self._requested_s + _RETURN_LIMIT_S

    def reset_limit(self) -> None:
        """Apply the normal limit again."""
        self._shortened_until_s = 0.0

    def keep_only(self, workers: Collection[Worker]) -> None:
        """Forget the pending requests and the heartbeats of all members except ``workers``."""
        self._owed = {ref: worker for ref, worker in self._owed.items() if worker in workers}
        self.heartbeats = {
            worker: heartbeat for worker, heartbeat in self.heartbeats.items() if worker in workers
        }
        self._new = {worker: heartbeat for worker, heartbeat in self._new.items() if worker in workers}
        self.returning = self.returning.intersection(workers)

    def poll(self, actors: Mapping[Worker, Any]) -> frozenset[Worker]:
        """Request heartbeats when due, and return the members that count as lost.

        These are members whose heartbeat failed, is overdue or is invalid. If `accuse` was called since the last
        call of this method, only the accused members are returned.
        """
        self.unresponsive = frozenset()
        accused, self._accused = self._accused & actors.keys(), set()
        if accused:
            return frozenset(accused)
        now_s = time.monotonic()
        late_s, self._polled_s = now_s - self._polled_s, now_s
        if late_s > _LATE_S:
            self._requested_s += late_s
        if self._owed:
            ready, owing = ray.wait(list(self._owed), num_returns=len(self._owed), timeout=0)
            lost = {self._owed[ref] for ref in ready if not self._take(ref)}
            if now_s < self._returning_until_s and (returning := lost & self.unresponsive & self.returning):
                # After a network cut, Ray fails calls until it has reconnected, so the detector asks these members
                # again.
                lost -= returning
                self.unresponsive -= returning
                self._owed = {ref: self._owed[ref] for ref in owing}
                self._owed |= {
                    actors[worker].status.remote(): worker for worker in returning if worker in actors
                }
                owing = list(self._owed)
            if owing and now_s - self._requested_s > self._limit_s(now_s):
                overdue = {self._owed[ref] for ref in owing}
                self.unresponsive |= overdue
                lost |= overdue
            if lost:
                return frozenset(lost)
            if owing or (now_s - self._requested_s < _PERIOD_S and not self._requests_at_once):
                return frozenset()
        self._requests_at_once = False
        self._owed = {actor.status.remote(): worker for worker, actor in actors.items()}
        self._requested_s = now_s
        return frozenset()

    def _take(self, ref: Any) -> bool:
        return self.accepts_heartbeat(self._owed[ref], ref)

    def accepts_heartbeat(self, worker: Worker, ref: Any) -> bool:
        """Store a member's heartbeat and return True; return False if the answer is an error or invalid.

        Args:
            worker: the member.
            ref: reference to the answer, which must have arrived.
        """
        try:
            heartbeat = answered(self._schema, ref, self._name(worker))
            if heartbeat.worker != worker:
                raise undeclared(self._name(worker), "a heartbeat of another member")
        except (RayError, ShareComputeError) as failure:
            if isinstance(failure, Undeclared) or is_refusal(failure):
                self._faults[worker] = _fault(failure, self._name(worker))
            elif isinstance(failure, ActorUnavailableError):
                self.unresponsive |= {worker}
            return False
        self.heartbeats[worker] = self._new[worker] = heartbeat
        self.returning -= {worker}
        return True

    def _limit_s(self, now_s: float) -> float:
        if self.are_loading:
            return _LOADING_LIMIT_S
        if self.returning and now_s < self._returning_until_s:
            return _RETURN_LIMIT_S
        return _SHORT_LIMIT_S if now_s < self._shortened_until_s else _LIMIT_S


def _fault(failure: Exception, machine: str) -> str:
    if isinstance(failure, ShareComputeError):
        return failure.message
    return undeclared(machine, "a pickle, or an error that cannot be read").message
