"""Selects the live statistics of deployments that an event stream sends. The statistics are not stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from pydantic import AwareDatetime

from share_compute_api.openai.metrics import Snapshot
from share_compute_api.schemas.bodies import DeploymentStatus, ReplicaCounts, ResponseBody

KIND = "figures"
PERIOD_S = 2.0
"""Minimum time between two reports to one client, in seconds."""
_AGAIN_S = 10.0
"""Time after which all statistics are sent again, in seconds; shows clients that unchanged statistics are current."""


class DeploymentFigures(ResponseBody):
    """Status of a deployment at one moment."""

    name: str
    at: AwareDatetime
    """Time at which the status was read."""
    replicas: ReplicaCounts
    status: DeploymentStatus
    """Status of the replicas, without predictions and interruptions; other events report when these change."""


class SentFigures:
    """Selects the statistics to send to one client: changed statistics, and at intervals all statistics."""

    def __init__(self) -> None:
        self._sent: dict[str, DeploymentFigures] = {}
        self._next_s = self._again_s = 0.0

    def news(self, deployments: Callable[[], Iterable[Snapshot]], now_s: float) -> list[DeploymentFigures]:
        """Return the statistics to send now, and remember them as sent.

        Changed statistics are returned at most every `PERIOD_S` seconds, and all statistics every `_AGAIN_S` seconds.

        Args:
            deployments: returns the current snapshots; called only when a report is due.
            now_s: the current time in seconds, on any monotonic clock.
        """
        if now_s < self._next_s:
            return []
        self._next_s = now_s + PERIOD_S
        at = datetime.now(UTC)
        seen = {one.name: _figures(one, at) for one in deployments()}
        news = [one for one in seen.values() if not _is_unchanged(one, self._sent.get(one.name))]
        if now_s >= self._again_s:
            self._again_s = now_s + _AGAIN_S
            news = list(seen.values())
        self._sent = seen
        return news


def _is_unchanged(one: DeploymentFigures, before: DeploymentFigures | None) -> bool:
    return before is not None and one == before.model_copy(update={"at": one.at})


def _figures(one: Snapshot, at: datetime) -> DeploymentFigures:
    bare = {"prediction": None, "interruptions": ()}
    replicas = tuple(status.model_copy(update=bare) for _, status in sorted(one.replicas.items()))
    return DeploymentFigures(
        name=one.name, at=at, replicas=one.counts, status=DeploymentStatus(replicas=replicas)
    )
