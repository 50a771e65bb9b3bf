"""Figures of deployments as they change: told to whoever has the stream of events open, and kept nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from pydantic import AwareDatetime

from share_compute_api.metrics import Snapshot
from share_compute_api.schemas import DeploymentStatus, ReplicaCounts, View

KIND = "figures"
PERIOD_S = 2.0
"""Least time between two of one deployment."""
_AGAIN_S = 10.0
"""What has not changed is told again after so long: who listens knows how old it is."""


class DeploymentFigures(View):
    """How a deployment does at one moment."""

    name: str
    at: AwareDatetime
    """When that was seen."""
    replicas: ReplicaCounts
    status: DeploymentStatus
    """Without predictions and interruptions, which change with events only."""


class Figures:
    """What one listener was told."""

    def __init__(self) -> None:
        self._told: dict[str, DeploymentFigures] = {}
        self._next_s = self._again_s = 0.0

    def news(self, deployments: Callable[[], Iterable[Snapshot]], now_s: float) -> list[DeploymentFigures]:
        """Return what changed since it was told, at most every so often; all of it now and then.

        Args:
            deployments: says how they are; asked only when it is time.
            now_s: the time; its beginning does not matter.
        """
        if now_s < self._next_s:
            return []
        self._next_s = now_s + PERIOD_S
        at = datetime.now(UTC)
        seen = {one.name: _figures(one, at) for one in deployments()}
        news = [one for one in seen.values() if not _says_the_same(one, self._told.get(one.name))]
        if now_s >= self._again_s:
            self._again_s = now_s + _AGAIN_S
            news = list(seen.values())
        self._told = seen
        return news


def _says_the_same(one: DeploymentFigures, before: DeploymentFigures | None) -> bool:
    return before is not None and one == before.model_copy(update={"at": one.at})


def _figures(one: Snapshot, at: datetime) -> DeploymentFigures:
    bare = {"prediction": None, "interruptions": ()}
    replicas = tuple(status.model_copy(update=bare) for _, status in sorted(one.replicas.items()))
    return DeploymentFigures(
        name=one.name, at=at, replicas=one.counts, status=DeploymentStatus(replicas=replicas)
    )
