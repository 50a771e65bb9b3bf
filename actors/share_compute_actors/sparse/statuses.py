"""Checks whether servers answer, without waiting for them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

STATUS_S = 30.0
"""Time after which a server that has not answered is given up."""
_WAIT_S = 0.2


class ServerStatuses:
    """Keeps at most one pending call of ``status`` for each server."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[Any, float]] = {}
        """Calls that were not answered yet, and when they were made, by machine."""

    def lost(self, servers: Mapping[str, Any]) -> list[str]:
        """Ask all servers; return the machines of those that failed, or have not answered for a long time.

        Args:
            servers: server of each machine.
        """
        now = time.monotonic()
        for machine, actor in servers.items():
            if machine not in self._calls:
                self._calls[machine] = (actor.status.remote(), now)
        refs = [ref for ref, _ in self._calls.values()]
        ready = ray.wait(refs, num_returns=len(refs), timeout=_WAIT_S)[0] if refs else []
        found = []
        for machine, (ref, since) in list(self._calls.items()):
            if ref in ready:
                del self._calls[machine]
                try:
                    ray.get(ref)
                except RayError:
                    found.append(machine)
            elif now - since > STATUS_S:
                found.append(machine)
        return found

    def forget(self, machine: str) -> None:
        """Forget the call to a server that was ended."""
        self._calls.pop(machine, None)
