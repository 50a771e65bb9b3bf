"""Decides which replicas of a deployment get new requests, and in which order they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from share_compute.inference.scheduler.sharing import Backlog, in_turn
from share_compute_api.openai.replica import Replica

MOVES_AFTER_S = 10.0
"""Seconds after which the sequences of an unready replica may move to other replicas."""


@dataclass(slots=True)
class _Status:
    """The last known status of one replica."""

    is_ready: bool = False
    unready_since_s: float | None = None
    is_draining: bool = False
    """Whether the replica is finishing its current sequences and gets no new ones."""
    tokens_per_s: float | None = None

    @property
    def takes(self) -> bool:
        """Whether the replica gets new requests."""
        return self.is_ready and not self.is_draining


class Router:
    """Tracks which replicas of one deployment are ready, and sorts them for new requests by expected delay."""

    def __init__(self) -> None:
        self._replicas: dict[Replica, _Status] = {}

    def __iter__(self) -> Iterator[Replica]:
        """Iterate over all replicas."""
        return iter(self._replicas)

    def __contains__(self, replica: object) -> bool:
        """Return whether a replica has been added and not removed."""
        return replica in self._replicas

    def add(self, replica: Replica) -> None:
        """Add a replica; the replica gets no requests until `see` reports it as ready."""
        self._replicas[replica] = _Status()

    def see(self, replica: Replica, tokens_per_s: float | None, *, is_ready: bool, now_s: float) -> bool:
        """Record the status of a replica; return whether the replica has become ready."""
        status = self._replicas[replica]
        has_become_ready = is_ready and not status.is_ready
        status.is_ready, status.tokens_per_s = is_ready, tokens_per_s
        if is_ready:
            status.unready_since_s = None
        elif status.unready_since_s is None:
            status.unready_since_s = now_s
        return has_become_ready

    def retire(self, replica: Replica, *, is_draining: bool) -> None:
        """Stop giving new requests to a replica; with ``is_draining=False``, resume."""
        self._replicas[replica].is_draining = is_draining

    def remove(self, replica: Replica) -> None:
        """Remove a replica."""
        del self._replicas[replica]

    @property
    def takers(self) -> list[Replica]:
        """The replicas that get new requests."""
        return [replica for replica, status in self._replicas.items() if status.takes]

    @property
    def is_any_ready(self) -> bool:
        """Whether any replica is ready, including replicas that get no new requests."""
        return any(status.is_ready for status in self._replicas.values())

    def is_overdue(self, replica: Replica, now_s: float) -> bool:
        """Return whether a replica has been unready for `MOVES_AFTER_S` while another replica gets new requests."""
        since_s = self._replicas[replica].unready_since_s
        return since_s is not None and now_s - since_s >= MOVES_AFTER_S and bool(self.takers)

    def in_turn(self, new: int, ongoing: Callable[[Replica], int]) -> list[Replica]:
        """Return the replicas that get new requests, in the order of `sharing.in_turn`.

        Args:
            new: number of the new sequences.
            ongoing: returns the number of sequences on a replica.
        """
        takers = self.takers
        backlogs = [Backlog(ongoing(one), self._replicas[one].tokens_per_s) for one in takers]
        return [takers[index] for index in in_turn(backlogs, new)]
