"""Decides which machines each replica of a deployment may use: its own machines, and free ones while it needs more.

Machines are leased before they are offered to a replica. When a replica has not changed for some seconds, its unused
machines are taken back. A machine that was taken back is released for other work when the replica has no process on the
machine, or after `_LEAVING_S` seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.lifecycle.states import ContributorState
from share_compute.store import ContributorRecord

_CALM_S = 3.0
"""Seconds without a change after which a ready replica with all requested stages loses its unused machines."""
_THINKING_S = 30.0
"""Seconds without a change after which a replica that is not ready, or has fewer stages than requested, loses its
unused machines. All machines of the replica are then added to `Slot.tried`."""
_LEAVING_S = 30.0
"""Seconds after which a machine that was taken back is released, even if the replica still uses it."""

Nodes = frozenset[tuple[str, str | None]]
"""Contributor ids with their Ray nodes. A contributor that reconnects with another node counts as another machine."""


def nodes(machines: Iterable[ContributorRecord]) -> Nodes:
    """Return the (id, Ray node) pair of each machine."""
    return frozenset((machine.id, machine.node_id) for machine in machines)


@dataclass(slots=True)
class Slot:
    """The machines and the last status of one replica."""

    stages: int | None
    """Requested number of stages; None if the planner decides."""
    machines: set[str] = field(default_factory=set)
    """Ids of the contributors that the replica may use."""
    parting: dict[str, float] = field(default_factory=dict)
    """Machines that were taken back and are not released yet: contributor id -> time of taking it back, in seconds."""
    status: ServingStatus | None = None
    tried: Nodes = frozenset()
    """Machines that did not suffice for the replica to become ready with all requested stages."""
    _changed_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether the replica answers requests."""
        return self.status is not None and self.status.state is DeploymentState.ready

    @property
    def is_content(self) -> bool:
        """Whether the replica is ready and has the requested number of stages, if a number was requested."""
        assert self.status is not None or not self.is_ready
        return self.is_ready and self.stages in (None, len(self.status.stages) if self.status else None)

    @property
    def holds(self) -> frozenset[str]:
        """Ids of the contributors on which the replica has processes or memory."""
        return frozenset(self.status.holds if self.status is not None else ())

    def see(self, status: ServingStatus | None, now_s: float) -> None:
        """Record the replica's newest status.

        If the state, the epoch, the used machines or ``is_reading_model`` changed, the wait before unused machines are
        taken back restarts.
        """
        before, self.status = self.status, status
        if before is None or status is None or _essence(before) != _essence(status):
            self._changed_s = now_s

    def give(self, machines: Iterable[str], now_s: float) -> None:
        """Let the replica use these machines, even if some of them were taken back."""
        new = set(machines) - self.machines
        if new:
            self.machines |= new
            self._changed_s = now_s
        for machine in new:
            self.parting.pop(machine, None)

    def wants(self, free: Iterable[ContributorRecord]) -> bool:
        """Return whether the replica needs more machines, and ``free`` has a machine that the replica has not tried.

        The replica needs more machines if it is not ready, or has fewer stages than requested.
        """
        return not self.is_content and not nodes(free) <= self.tried

    def settle(
        self, present: Mapping[str, ContributorRecord], now_s: float, unwanted: Collection[str] = ()
    ) -> frozenset[str]:
        """Start to take back unused, unwanted and draining machines; return the ids of those that are released now.

        A machine is released if an earlier call took it back, and either the replica has no process on the machine or
        `_LEAVING_S` seconds have passed.

        Args:
            present: contributors that are ready or draining, by id.
            now_s: the time in seconds.
            unwanted: ids of machines that the deployment may no longer use, because their labels changed.
        """
        self.machines &= present.keys()  # machines that are not present are lost
        leaving = {
            one for one in self.machines if present[one].state is ContributorState.draining or one in unwanted
        }
        patience_s = _CALM_S if self.is_content else _THINKING_S
        unused: set[str] = set()
        is_reading_model = self.status is None or self.status.is_reading_model
        if not is_reading_model and now_s - self._changed_s > patience_s:
            unused = self.machines - self.holds
            if unused and not self.is_content:
                self.tried |= nodes(present[one] for one in self.machines)
        for machine in leaving | unused:
            self.machines.discard(machine)
            self.parting[machine] = now_s
        gone = {
            machine
            for machine, since_s in self.parting.items()
            if now_s > since_s and (machine not in self.holds or now_s - since_s > _LEAVING_S)
        }
        for machine in gone:
            del self.parting[machine]
        return frozenset(gone)


def _essence(status: ServingStatus) -> tuple[object, ...]:
    return status.state, status.is_reading_model, status.epoch, status.holds
