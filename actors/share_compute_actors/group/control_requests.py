"""Holds the control plane's requests to a running attempt until the attempt reads them."""

from __future__ import annotations

import threading

from share_compute.lifecycle.attempt_events import Offer


class ControlRequests:
    """Requests to a running attempt: cancel, suspend, leave machines, use other machines. Thread-safe."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.suspended = threading.Event()
        """Set when the attempt is to write a checkpoint and end, so that another attempt continues from it."""
        self._lock = threading.Lock()
        self._leaving: set[str] = set()
        self.offered: Offer | None = None
        """Latest offer of machines that the attempt may use; None if the attempt has not received an offer."""

    def leave(self, contributor_id: str) -> None:
        """Ask the attempt to stop using a machine."""
        with self._lock:
            self._leaving.add(contributor_id)

    def offer(self, offer: Offer) -> None:
        """Set the machines that the attempt may use; this cancels earlier `leave` requests for them."""
        with self._lock:
            self.offered = offer
            self._leaving.difference_update(machine.id for machine in offer.topology.contributors)

    @property
    def leaving(self) -> frozenset[str]:
        """Ids of the machines that the attempt must stop using."""
        with self._lock:
            return frozenset(self._leaving)
