"""Distinguishes the loss of members from a failure of this host's own network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime

import ray

from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.machine.launch import ABSENCE_S
from share_compute_actors.machine.reach import Place, answers

_POLL_S = 0.25
_TABLE_S = 1.0
"""Longest wait for Ray's table of nodes, in seconds; the head's GCS may not answer."""
_RECENT_S = 10.0


class OwnLink:
    """Detects whether this host itself is cut off from the other hosts, and waits until it is connected again.

    Args:
        cancelled: event that is set when the job is cancelled or the replica is stopped.
        note: called with each message for the user.
    """

    def __init__(self, cancelled: threading.Event, note: Callable[[str], None]) -> None:
        self._cancelled = cancelled
        self._note = note
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="table-of-nodes")
        self._pending: Future[dict[str, Place]] | None = None
        self._nodes: dict[str, Place] = {}
        self._here: str = ray.util.get_node_ip_address()
        self._restored_s = float("-inf")

    @property
    def was_cut(self) -> bool:
        """Whether a call of `wait` ended at most 10 s ago, so that older connections may still be dead."""
        return time.monotonic() - self._restored_s < _RECENT_S

    def has_failed(self, unresponsive: Collection[str], all_: Collection[str]) -> bool:
        """Return whether this host is probably cut off: members elsewhere are unresponsive, and no other host answers.

        If there is only one other host and members run on this host, return False: the other host has probably failed.

        Args:
            unresponsive: IP addresses of unresponsive members.
            all_: IP addresses of all members.
        """
        if set(unresponsive) <= {self._here}:
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
        """Return the address and port of each living Ray node, by node id; the last known nodes if Ray is too slow."""
        self._look_up()
        return self._nodes

    def wait(self) -> None:
        """Wait until another host answers, for ten minutes at most.

        Raises:
            Cancelled: the job was cancelled, or the replica was stopped.
        """
        begun_s = time.monotonic()
        self._note(
            "no other machine can be reached: the server's own network may be cut. All machines keep what they hold, "
            "and training waits"
        )
        while not (is_back := bool(answers(self._others, until_first=True))):
            if time.monotonic() - begun_s >= ABSENCE_S:
                break
            if self._cancelled.wait(_POLL_S):
                raise Cancelled
        self._restored_s = time.monotonic()
        state = "machines can be reached again" if is_back else "no machine can be reached"
        self._note(f"{state} after {self._restored_s - begun_s:.0f} s")

    def _look_up(self) -> None:
        """Update the table of nodes; keep the old table if Ray does not answer in time."""
        if self._pending is None:
            self._pending = self._threads.submit(self._table)
        try:
            self._nodes = self._pending.result(_TABLE_S)
        except OutOfTime:
            return
        self._pending = None

    def _table(self) -> dict[str, Place]:
        return {
            str(node["NodeID"]): (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
            for node in ray.nodes()
            if node["Alive"]
        }
