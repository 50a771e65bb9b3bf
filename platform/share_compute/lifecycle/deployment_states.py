"""States of a deployment, and the transitions between them."""

from __future__ import annotations

from enum import StrEnum

from share_compute.errors import Conflict


class DeploymentState(StrEnum):
    """State of a deployment."""

    pending = "pending"
    """The deployment waits for machines, or for its server process to start."""
    loading = "loading"
    """Members load their shards."""
    ready = "ready"
    """The deployment answers requests. If it is scaled to zero, the next request starts a replica."""
    degraded = "degraded"
    """Fewer replicas than the requested minimum are ready; requests may wait."""
    stopped = "stopped"
    """The deployment was taken down."""
    failed = "failed"
    """The deployment failed and is not started again; its ``reason`` says why."""

    @property
    def is_final(self) -> bool:
        """Whether the state is final; the deployment's name is then free again."""
        return self in (DeploymentState.stopped, DeploymentState.failed)


LIVE = tuple(state for state in DeploymentState if not state.is_final)
"""States in which a deployment keeps its name."""
_ENDS = frozenset({DeploymentState.stopped, DeploymentState.failed})
_NEXT: dict[DeploymentState, frozenset[DeploymentState]] = {
    DeploymentState.pending: _ENDS | {DeploymentState.loading},
    # A deployment returns to pending if it lost its machines, or if the server restarted.
    DeploymentState.loading: _ENDS
    | {DeploymentState.ready, DeploymentState.degraded, DeploymentState.pending},
    DeploymentState.ready: _ENDS
    | {DeploymentState.degraded, DeploymentState.loading, DeploymentState.pending},
    DeploymentState.degraded: _ENDS
    | {DeploymentState.ready, DeploymentState.loading, DeploymentState.pending},
    DeploymentState.stopped: frozenset(),
    DeploymentState.failed: frozenset(),
}


def check_change(name: str, current: DeploymentState, wanted: DeploymentState) -> None:
    """Raise Conflict unless the deployment called ``name`` may go from ``current`` to ``wanted``."""
    if wanted not in _NEXT[current]:
        allowed = ", ".join(sorted(state.value for state in _NEXT[current]))
        raise Conflict(
            f"deployment {name} is {current.value}; it cannot become {wanted.value}",
            hint=f"from here it can become {allowed}" if allowed else "deploy it again; this one is over",
        )
