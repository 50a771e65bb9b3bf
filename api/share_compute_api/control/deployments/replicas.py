"""Which machines each replica of a deployment may use: those that it holds, and free ones until it needs no more.

Machines are leased before they are offered. Machines that a replica does not use are taken back once it has settled. A
machine is free for others when nothing of the replica is left on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.lifecycle.states import ContributorState
from share_compute.store import ContributorRecord

_CALM_S = 3.0
"""Seconds without a change after which a replica with all it was asked for gives unused machines back."""
_THINKING_S = 30.0
"""Seconds without a change after which any other replica gives unused machines back: they did not help it."""
_LEAVING_S = 30.0
"""Seconds after which a machine that is to be given back is released, even if the replica still uses it."""

Nodes = frozenset[tuple[str, str | None]]
"""Contributors with their Ray nodes: a contributor that comes back may be another machine than before."""


def nodes(machines: Iterable[ContributorRecord]) -> Nodes:
    """Return the ids and Ray nodes of machines, by which sets of machines are compared."""
    return frozenset((machine.id, machine.node_id) for machine in machines)


@dataclass(slots=True)
class Slot:
    """One replica's machines and its status."""

    stages: int | None
    """Number of stages that were asked for; None leaves it open."""
    machines: set[str] = field(default_factory=set)
    """Ids of the contributors that it may use."""
    parting: dict[str, float] = field(default_factory=dict)
    """Machines that it is to give back, with the time since when."""
    status: ServingStatus | None = None
    tried: Nodes = frozenset()
    """Machines that it had, without getting all it was asked for."""
    _changed_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether the replica answers requests."""
        return self.status is not None and self.status.state is DeploymentState.ready

    @property
    def is_content(self) -> bool:
        """Whether the replica is ready, with as many stages as were asked for."""
        assert self.status is not None or not self.is_ready
        return self.is_ready and self.stages in (None, len(self.status.stages) if self.status else None)

    @property
    def holds(self) -> frozenset[str]:
        """Contributors on which something of the replica is."""
        return frozenset(self.status.holds if self.status is not None else ())

    def see(self, status: ServingStatus | None, now_s: float) -> None:
        """Replace the status; ``now_s`` becomes the time of the last change if it changed in essence."""
        before, self.status = self.status, status
        if before is None or status is None or _essence(before) != _essence(status):
            self._changed_s = now_s

    def give(self, machines: Iterable[str], now_s: float) -> None:
        """Let the replica use more machines."""
        new = set(machines) - self.machines
        if new:
            self.machines |= new
            self._changed_s = now_s
        for machine in new:
            self.parting.pop(machine, None)

    def wants(self, free: Iterable[ContributorRecord]) -> bool:
        """Return whether free machines may bring what the replica lacks."""
        return not self.is_content and not nodes(free) <= self.tried

    def settle(self, present: Mapping[str, ContributorRecord], now_s: float) -> frozenset[str]:
        """Take back machines that it does not need or that are leaving; return those that are released now.

        Args:
            present: the contributors that are ready or drain, by id.
            now_s: the time in seconds.
        """
        self.machines &= present.keys()  # the others are lost
        leaving = {one for one in self.machines if present[one].state is ContributorState.draining}
        patience_s = _CALM_S if self.is_content else _THINKING_S
        unused: set[str] = set()
        is_looking = self.status is None or self.status.is_looking
        if not is_looking and now_s - self._changed_s > patience_s:
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
    return status.state, status.is_looking, status.epoch, status.holds
