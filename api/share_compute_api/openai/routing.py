"""Routing: which replicas of a deployment get requests, and in which order they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from share_compute.inference.scheduler.sharing import Backlog, in_turn
from share_compute_api.openai.replica import Replica

_MOVES_AFTER_S = 10.0
"""Seconds that a replica is not ready before others continue its sequences; most are ready again sooner."""


@dataclass(slots=True)
class _Status:
    """The last status of one replica."""

    is_ready: bool = False
    unready_since_s: float | None = None
    is_leaving: bool = False
    """Whether it only finishes its sequences, and gets no new ones."""
    tokens_per_s: float | None = None

    @property
    def takes(self) -> bool:
        """Whether it gets new requests."""
        return self.is_ready and not self.is_leaving


class Router:
    """The replicas of one deployment, without their sequences; the caller provides the time."""

    def __init__(self) -> None:
        self._replicas: dict[Replica, _Status] = {}

    def __iter__(self) -> Iterator[Replica]:
        """Iterate over all replicas."""
        return iter(self._replicas)

    def __contains__(self, replica: object) -> bool:
        """Return whether a replica was added and not removed."""
        return replica in self._replicas

    def add(self, replica: Replica) -> None:
        """Add a replica; it gets no requests until `see` reports it ready."""
        self._replicas[replica] = _Status()

    def see(self, replica: Replica, tokens_per_s: float | None, *, is_ready: bool, now_s: float) -> bool:
        """Record the status of a replica; return whether it has become ready."""
        status = self._replicas[replica]
        has_become_ready = is_ready and not status.is_ready
        status.is_ready, status.tokens_per_s = is_ready, tokens_per_s
        if is_ready:
            status.unready_since_s = None
        elif status.unready_since_s is None:
            status.unready_since_s = now_s
        return has_become_ready

    def retire(self, replica: Replica, *, is_leaving: bool) -> None:
        """Give a replica no new requests, or give it requests again."""
        self._replicas[replica].is_leaving = is_leaving

    def remove(self, replica: Replica) -> None:
        """Forget a replica."""
        del self._replicas[replica]

    @property
    def takers(self) -> list[Replica]:
        """The replicas that get new requests."""
        return [replica for replica, status in self._replicas.items() if status.takes]

    @property
    def is_any_ready(self) -> bool:
        """Whether any replica answers, leaving ones included."""
        return any(status.is_ready for status in self._replicas.values())

    def is_overdue(self, replica: Replica, now_s: float) -> bool:
        """Return whether a replica has not been ready for so long that others should continue its sequences."""
        since_s = self._replicas[replica].unready_since_s
        return since_s is not None and now_s - since_s >= _MOVES_AFTER_S and bool(self.takers)

    def in_turn(self, new: int, ongoing: Callable[[Replica], int]) -> list[Replica]:
        """Return the replicas to ask for ``new`` sequences, the one that should end them first first.

        Args:
            new: number of the new sequences.
            ongoing: returns the number of sequences that a replica has.
        """
        takers = self.takers
        backlogs = [Backlog(ongoing(one), self._replicas[one].tokens_per_s) for one in takers]
        return [takers[index] for index in in_turn(backlogs, new)]
