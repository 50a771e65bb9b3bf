"""What is new of the times in which a replica computed nothing: a state machine without a clock."""

from __future__ import annotations

from share_compute.serving.states import DeploymentState
from share_compute.serving.status import Interruption, ServingStatus

_DIED = "its server died; another one is started"


class Interruptions:
    """Of one replica, whatever server it has: servers count their own, this counts those of all."""

    def __init__(self) -> None:
        self._number = 0
        self._seen = 0
        """Number of the last one that the present server told."""
        self._open: dict[int, tuple[int, float]] = {}
        """Those of the present server that last: our numbers, and when they began."""
        self._orphans: dict[int, float] = {}
        """When those began whose server died, by our numbers; they last until the next one is ready."""
        self._was_ready = False

    def news(self, status: ServingStatus, now_s: float) -> list[Interruption]:
        """Return what a status tells that was not told before: beginnings, which have no ``seconds``, and ends."""
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
        """Its server died; the next one counts anew. Return what is to be told of it."""
        self._orphans |= self._open.values()
        self._seen = 0
        self._open.clear()
        if not self._was_ready:
            return []
        self._was_ready = False
        self._number += 1
        self._orphans[self._number] = now_s
        return [Interruption(number=self._number, reason=_DIED, ago_s=0.0)]
