"""Forms the stages of a deployment, and forms them again when machines are lost, leave or join.

The remaining members continue at once: they load the layers of a lost machine, if they can hold them. Meanwhile members
start on machines that would improve the plan; they take part once their shards are loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from share_compute.errors import (
    ContributorLost,
    PlanInfeasible,
    ShareComputeError,
    StaleEpoch,
    Unavailable,
    UserError,
)
from share_compute.protocol.roster import Worker
from share_compute.quantities import listed
from share_compute.serving.placement import Placement, limits_of
from share_compute.serving.states import DeploymentState
from share_compute.serving.turns import Turn
from share_compute.topology import Topology
from share_compute_actors.coordinator.channels import open_channels
from share_compute_actors.coordinator.party import MembersLost
from share_compute_actors.serving.crew import ServingCrew
from share_compute_actors.serving.desk import Desk
from share_compute_actors.serving.messages import Row
from share_compute_actors.serving.planner import Planner
from share_compute_actors.serving.rests import Rests
from share_compute_actors.serving.standing import Standing

_LEFT = 0.8
"""Factor on a machine's KV capacity each time its memory did not suffice."""
_PATIENCE_S = 120.0
"""Longest wait of sequences for machines that can continue them, in seconds."""
_MOST_IN_VAIN = 5
"""Number of failed attempts in a row to form stages, though no member was lost, after which their members are
removed."""
_log = logging.getLogger(__name__)


class Assembly:
    """Plans and forms the stages of one replica.

    Args:
        planner: finds the best placement.
        crew: members, and the machines on which they may run.
        desk: the scheduler service, which gets the limits of each epoch.
        standing: status of the deployment.
    """

    def __init__(self, planner: Planner, crew: ServingCrew, desk: Desk, standing: Standing) -> None:
        self._planner = planner
        self._crew = crew
        self._offered = crew.topology
        self._desk = desk
        self._standing = standing
        self.epoch = 0
        self.placement: Placement | None = None
        """The placement that computes now; None if none does."""
        self._target: Placement | None = None
        """The placement that replaces it as soon as its machines are ready; None if none is planned."""
        self._tried: frozenset[Worker] = frozenset()
        """Set of members with which `_go_on` was tried last; it is not repeated with the same set."""
        self._room_left: dict[Worker, float] = {}
        self._rests = Rests()
        self._resting: frozenset[Worker] = frozenset()
        self._is_to_plan = True
        self._in_vain = 0
        self._was_ready = False
        self._lacking: str | None = None
        """Reason why the machines cannot hold the model together; None if none is known."""
        self._waits_since_s: float | None = None

    def close(self) -> None:
        """End all members, and stop planning."""
        self._planner.close()
        self._crew.dismiss()

    # -- from the server ---------------------------------------------------------------------------------------------

    def name(self, worker: Worker) -> str:
        """Return the name of a machine."""
        return self._crew.name(worker)

    def send(self, turns: list[Turn]) -> None:
        """Send engine steps to all stages."""
        assert self.placement is not None
        self._crew.send(turns, self.placement.workers)

    def offer(self, topology: Topology) -> None:
        """Replace the machines that may be used."""
        self._offered = topology
        known = {machine.id for machine in topology.contributors}
        former = (machine for machine in self._crew.topology.contributors if machine.id not in known)
        self._crew.topology = Topology((*topology.contributors, *former), topology.links)
        self._is_to_plan = True

    def shrink(self, worker: Worker) -> None:
        """Reduce the KV capacity of a machine whose memory did not suffice."""
        self._room_left[worker] = _LEFT * self._room_left.get(worker, 1.0)

    def is_from(self, worker: Any, key: Any) -> bool:
        """Whether a key is the one issued to this member."""
        return self._crew.is_from(worker, key)

    def accuse(self, worker: Worker, failure: ShareComputeError) -> None:
        """Count a member as lost, because it sent something that it should not have."""
        self._crew.pulse.accuse(worker, failure)

    def expel(self, worker: Worker) -> None:
        """Remove a member that sent an impossible tensor; its machine gets a backoff, as after a loss."""
        self._crew.remove([worker])
        self._lose([worker])

    def worry(self) -> None:
        """Check at once whether all members are alive, because something went wrong between them."""
        self._crew.pulse.worry()

    @property
    def is_idle(self) -> bool:
        """Whether no member computes, by their last heartbeats."""
        return not any(sign.is_computing for sign in self._crew.pulse.signs.values())

    def break_up(self, why: str, lost: tuple[str, ...] = ()) -> None:
        """Stop the current stages, whose pending work is lost; ``lost`` has the names of lost machines."""
        if self.placement is not None:
            self.placement, self._tried = None, frozenset()
            self._standing.lost(why, lost)
            self._standing.move(DeploymentState.degraded, f"{why}; requests wait until others go on")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Check members and machines, and form stages where that is due.

        Raises:
            Cancelled: all work is to end.
            UserError: the model cannot be served.
        """
        self._lose(self._crew.feel_pulse())
        self._take_in()
        if self.placement is None:
            self._go_on()
        self._plan()
        if self._target is not None and self._crew.workers.issuperset(self._target.workers):
            self._form(self._target)
        self._tidy()
        self._bound_wait()
        self._standing.look(self._crew.workers, self._crew.expected, self._crew.pulse.signs)

    def _lose(self, workers: Collection[Worker]) -> None:
        if not workers:
            return
        lost = tuple(sorted(self.name(worker) for worker in workers))
        names = listed(lost)
        _log.warning("lost %s", names)
        for worker in workers:
            if fault := self._crew.pulse.take_fault(worker):
                _log.warning("%s", fault)
            self._rests.lost(worker, time.monotonic())
        if self.placement is not None and not set(self.placement.workers).isdisjoint(workers):
            self.break_up(f"lost {names}", lost)
        self._is_to_plan = True

    def _take_in(self) -> None:
        for worker, failure in self._crew.take_in().items():
            _log.warning("%s does not serve: %s", self.name(worker), failure.message)
            if isinstance(failure, UserError):
                raise failure
            self._lacking = f"{self.name(worker)}: {failure.message}"
            self._rests.lost(worker, time.monotonic())
            self._is_to_plan = True

    def _go_on(self) -> None:
        """Form stages from the present members, if they can hold the model."""
        there = self._crew.workers
        if not there or there == self._tried or not self._was_ready:
            return
        self._tried = there
        with suppress(PlanInfeasible):
            self._form(self._planner.at_once(self._among(there), self.epoch + 1))

    def _plan(self) -> None:
        """Plan with all machines in the background, and start members for the result."""
        resting = self._rests.resting(time.monotonic())
        self._is_to_plan |= resting != self._resting
        self._resting = resting
        if self._is_to_plan and not self._planner.is_busy:
            self._is_to_plan = False
            usable = {machine.id for machine in self._offered.contributors} - resting
            machines = self._among(usable | self._crew.workers)
            self._planner.begin(machines, self.epoch + 1, is_first=not self._was_ready)
        try:
            wanted = self._planner.answer()
        except PlanInfeasible as lacking:
            if not resting or self._lacking is None:  # otherwise the reason is already known
                self._lacking = f"{lacking.message}: {lacking.hint}"
            self._aim(None)
        else:
            if wanted is not None:
                self._lacking = None
                self._aim(wanted)

    def _among(self, workers: Collection[Worker]) -> Topology:
        machines = tuple(machine for machine in self._offered.contributors if machine.id in workers)
        return Topology(machines, self._offered.links)

    def _aim(self, wanted: Placement | None) -> None:
        offered = {machine.id for machine in self._offered.contributors}
        if wanted is not None and not self._planner.is_better(wanted, self.placement, offered):
            wanted = None
        self._target = wanted
        self._crew.invite(wanted)
        if self.placement is not None:
            return
        if wanted is not None:
            coming = listed(sorted(map(self.name, self._crew.expected)))
            loading = f"{coming} load what they are to hold" if coming else "pools are formed"
            self._standing.move(DeploymentState.loading, loading)
        else:
            state = DeploymentState.degraded if self._was_ready else DeploymentState.pending
            self._standing.move(state, f"waiting for machines: {self._lacking}")

    def _form(self, placement: Placement) -> None:
        """Form the stages of a placement, and let them compute from now on."""
        self.placement = None
        self.epoch += 1
        self._crew.halt(self.epoch)
        workers = placement.workers
        try:
            self._crew.load(placement)
            limits = limits_of(
                self._planner.spec,
                placement,
                {worker: self._crew.held[worker].holding for worker in workers},
                self._planner.window_tokens,
                self._room_left,
                embeds=self._planner.embeds,
            )
            if len(workers) > 1:
                open_channels(self._crew, self.epoch, workers, self._planner.channel, _log.info)
            self._crew.begin(Row(self.epoch, workers, tuple(map(self.name, workers))))
        except MembersLost as loss:
            self._failed(loss.workers)
        except (ContributorLost, StaleEpoch) as failure:
            _log.warning("these pools could not be linked: %s", failure.message)
            self._in_vain += 1
            self._tried = frozenset()
            if self._in_vain >= _MOST_IN_VAIN:
                self._in_vain = 0
                self._failed(workers)
        except UserError:
            raise
        except ShareComputeError as failure:
            _log.warning("these pools cannot be formed: %s", failure.message)
            self._give_up(workers, failure)
        else:
            self._desk.reform(self.epoch, limits)
            self._formed(placement.at(self.epoch))

    def _give_up(self, workers: Collection[Worker], failure: ShareComputeError) -> None:
        """Remove the machine that the error names, or all machines if it names none."""
        self._lacking = failure.message
        self._failed([worker for worker in workers if self.name(worker) == failure.machine] or workers)

    def _failed(self, workers: Collection[Worker]) -> None:
        """Remove members that were lost or proved unusable."""
        self._target = None
        self._crew.remove(workers)
        self._lose(workers)

    def _formed(self, placement: Placement) -> None:
        self.placement = placement
        if self._target is not None and self._target.shards == placement.shards:
            self._target = None
        self._was_ready, self._in_vain, self._waits_since_s = True, 0, None
        self._desk.open()
        self._standing.formed(self.epoch, placement)
        self._standing.move(DeploymentState.ready, placement.sentence)

    def _tidy(self) -> None:
        """End members that are in neither the current nor the next placement."""
        if self.placement is None or self._is_to_plan or self._planner.is_busy:
            return
        target = () if self._target is None else self._target.workers
        self._crew.remove(self._crew.workers.difference(self.placement.workers, target))

    def _bound_wait(self) -> None:
        """Fail sequences that have waited too long for machines."""
        if self.placement is not None or self._target is not None or self._lacking is None:
            self._waits_since_s = None
            return
        now_s = time.monotonic()
        self._waits_since_s = self._waits_since_s or now_s
        if now_s - self._waits_since_s > _PATIENCE_S and self._desk.is_open:
            self._desk.close(
                Unavailable(
                    f"{self._planner.spec.name} lacks machines: {self._lacking}",
                    hint="try again when more machines are there",
                )
            )
