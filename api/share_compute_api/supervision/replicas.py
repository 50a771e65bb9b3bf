"""Which machines each replica of a deployment may use: those that it holds, and free ones until it has what it needs.

Machines are leased before they are offered. What a replica does not use is taken back when it has settled; a machine is
free for others when nothing of the replica is on it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from share_compute.jobs.states import ContributorState
from share_compute.serving.states import DeploymentState
from share_compute.serving.status import ServingStatus
from share_compute.store import ContributorRecord

_CALM_S = 3.0
"""A replica that has what it was asked for gives the rest back after so long."""
_THINKING_S = 30.0
"""One that has not, after so long without a change: nothing comes of these machines."""
_LEAVING_S = 30.0
"""A machine whose owner takes it back goes after so long, even if the replica cannot do without it."""

Nodes = frozenset[tuple[str, str | None]]
"""Contributors with their Ray nodes: who comes back may be another machine than before."""


def nodes(machines: Iterable[ContributorRecord]) -> Nodes:
    """Return what tells sets of machines apart."""
    return frozenset((machine.id, machine.node_id) for machine in machines)


@dataclass(slots=True)
class Slot:
    """The place of one replica: what it may use, and how it is."""

    pools: int | None
    """As many as were asked for."""
    machines: set[str] = field(default_factory=set)
    """Ids of the contributors that it may use."""
    parting: dict[str, float] = field(default_factory=dict)
    """Those that it is to give back, and since when."""
    status: ServingStatus | None = None
    tried: Nodes = frozenset()
    """Machines of which nothing came."""
    _changed_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return self.status is not None and self.status.state is DeploymentState.ready

    @property
    def is_content(self) -> bool:
        """Whether it has what it was asked for."""
        assert self.status is not None or not self.is_ready
        return self.is_ready and self.pools in (None, len(self.status.pools) if self.status else None)

    @property
    def holds(self) -> frozenset[str]:
        """Contributors on which something of it is."""
        return frozenset(self.status.holds if self.status is not None else ())

    def see(self, status: ServingStatus | None, now_s: float) -> None:
        """Take in how it is."""
        before, self.status = self.status, status
        if before is None or status is None or _essence(before) != _essence(status):
            self._changed_s = now_s

    def give(self, machines: Iterable[str], now_s: float) -> None:
        """Let it use more machines."""
        new = set(machines) - self.machines
        if new:
            self.machines |= new
            self._changed_s = now_s
        for machine in new:
            self.parting.pop(machine, None)

    def wants(self, free: Iterable[ContributorRecord]) -> bool:
        """Whether free machines may bring it what it lacks."""
        return not self.is_content and not nodes(free) <= self.tried

    def settle(self, present: Mapping[str, ContributorRecord], now_s: float) -> frozenset[str]:
        """Take machines back that it does not need, or that are to go; return those that are given back now.

        Args:
            present: the contributors that are ready or drain, by id.
            now_s: the time.
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
