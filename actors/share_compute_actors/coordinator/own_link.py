"""Tells the loss of members from a failure of this host's own network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime

import ray

from share_compute_actors.coordinator.coordinator import Cancelled
from share_compute_actors.machine.reach import Place, answers

_LOOK_S = 0.25
_LONGEST_CUT_S = 600.0
"""Members, and the nodes that they run on, wait as long for this host."""
_TABLE_S = 1.0
"""Longest wait for Ray's table of nodes: the GCS may be dead."""
_RECENT_S = 10.0


class OwnLink:
    """The network between this host and the others of the cluster.

    Args:
        cancelled: set when all is to end.
        note: takes a line for people.
    """

    def __init__(self, cancelled: threading.Event, note: Callable[[str], None]) -> None:
        self._cancelled = cancelled
        self._note = note
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="table-of-nodes")
        self._asked: Future[dict[str, Place]] | None = None
        self._nodes: dict[str, Place] = {}
        self._here: str = ray.util.get_node_ip_address()
        self._mended_s = float("-inf")

    @property
    def was_cut(self) -> bool:
        """Whether it was cut a moment ago: connections from before may still be dead."""
        return time.monotonic() - self._mended_s < _RECENT_S

    def has_failed(self, silent: Collection[str], all_: Collection[str]) -> bool:
        """Return whether no other host answers, so that this host is probably the one that is cut off.

        Where the only other host falls silent while members live here, that host counts as the one that failed.

        Args:
            silent: IP addresses of members that are silent.
            all_: IP addresses of all members.
        """
        if set(silent) <= {self._here}:
            return False
        self._look_up()
        others = self._others
        hosts = {address for address, _ in others}
        if not hosts or (len(hosts) == 1 and self._here in all_):
            return False
        return not answers(others, until_first=True)

    @property
    def _others(self) -> frozenset[Place]:
        return frozenset(place for place in self._nodes.values() if place[0] != self._here)

    def nodes(self) -> Mapping[str, Place]:
        """Return where each living Ray node answers, by its id; as it was known last if Ray does not say now."""
        self._look_up()
        return self._nodes

    def wait(self) -> None:
        """Wait until another host answers, for ten minutes at most.

        Raises:
            Cancelled: all is to end.
        """
        begun_s = time.monotonic()
        self._note(
            "no other machine can be reached: the server's own network may be cut. All machines keep what they hold, "
            "and training waits"
        )
        while time.monotonic() - begun_s < _LONGEST_CUT_S and not answers(self._others, until_first=True):
            if self._cancelled.wait(_LOOK_S):
                raise Cancelled
        self._mended_s = time.monotonic()
        self._note(f"machines can be reached again, after {self._mended_s - begun_s:.0f} s")

    def _look_up(self) -> None:
        """See which nodes there are; if Ray does not say, those of before."""
        if self._asked is None:
            self._asked = self._threads.submit(self._table)
        try:
            self._nodes = self._asked.result(_TABLE_S)
        except OutOfTime:
            return
        self._asked = None

    def _table(self) -> dict[str, Place]:
        return {
            str(node["NodeID"]): (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
            for node in ray.nodes()
            if node["Alive"]
        }
