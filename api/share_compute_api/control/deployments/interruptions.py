"""Tracks the interruptions of a replica: periods in which the replica computed nothing."""

from __future__ import annotations

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import Interruption, ServingStatus

_DIED = "its server died; another one is started"


class Interruptions:
    """Detects when interruptions of one replica begin and end, and numbers them from 1.

    Each new process of the replica's server numbers its interruptions from 1 again. The numbers of this class continue
    across such restarts.
    """

    def __init__(self) -> None:
        self._number = 0
        self._seen = 0
        """Highest interruption number that the current process of the replica's server has reported; 0 if none."""
        self._open: dict[int, tuple[int, float]] = {}
        """Ongoing interruptions: number given by the process -> (number given by this class, start time in seconds)."""
        self._orphans: dict[int, float] = {}
        """Interruptions whose process died: number given by this class -> start time in seconds. They last until the
        next process is ready."""
        self._was_ready = False

    def news(self, status: ServingStatus, now_s: float) -> list[Interruption]:
        """Process a status, and return the interruptions that began or ended since the previous status.

        An interruption is returned when it begins, with None as ``seconds``, and again when it ends, with its duration.
        """
        found = []
        if status.state is DeploymentState.ready:
            self._was_ready = True
            found += [
                Interruption(number=number, reason=_DIED, ago_s=now_s - began_s, seconds=now_s - began_s)
                for number, began_s in self._orphans.items()
            ]
            self._orphans.clear()
        for one in status.interruptions:
            if one.number > self._seen:
                self._seen = one.number
                self._number += 1
                self._open[one.number] = self._number, now_s - one.ago_s
                found.append(one.model_copy(update={"number": self._number, "seconds": None}))
            if one.seconds is not None and one.number in self._open:
                number, _ = self._open.pop(one.number)
                found.append(one.model_copy(update={"number": number}))
        return found

    def died(self, now_s: float) -> list[Interruption]:
        """Record that the process of the replica's server died.

        Returns:
            The interruption that begins with the death; an empty list if the process was never ready.
        """
        self._orphans |= self._open.values()
        self._seen = 0
        self._open.clear()
        if not self._was_ready:
            return []
        self._was_ready = False
        self._number += 1
        self._orphans[self._number] = now_s
        return [Interruption(number=self._number, reason=_DIED, ago_s=0.0)]
