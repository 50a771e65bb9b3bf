"""The connections of an attempt with the control plane, its members, and the other branches of the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from share_compute.lifecycle.attempt_events import AttemptEvent
from share_compute_actors.group.control_requests import ControlRequests
from share_compute_actors.training.rounds.messages import BranchUpdates

InboxItem = tuple[Any, Any, Any]
"""An unchecked message: id of the member that claims to be its sender, the key that came with it, and its content."""


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of one attempt."""

    report: Callable[[AttemptEvent], None]
    """Receives events."""
    requests: ControlRequests
    """Control requests of the control plane."""
    inbox: SimpleQueue[InboxItem]
    """Messages from members."""
    updates: SimpleQueue[BranchUpdates]
    """Answers of the synchronizer; unused unless the attempt is for a branch."""
    synchronizer: Any = None
    """Actor that merges the branches; None unless the attempt is for a branch."""
