"""Forms the stages of a deployment, and re-forms them when machines are lost, leave or join.

After a loss the remaining members load the missing layers, if they can hold the whole model. Members on other machines
load their shards in the background, before stages are formed with them.
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
from share_compute.inference.placement import Placement, limits_of
from share_compute.inference.scheduler.engine_steps import EngineStep
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.protocol.membership import Worker
from share_compute.quantities import listed
from share_compute.topology import Topology
from share_compute_actors.group.backoff import Backoff
from share_compute_actors.group.channels import open_channels
from share_compute_actors.group.exceptions import MembersLost
from share_compute_actors.inference.computation import ComputationChooser
from share_compute_actors.inference.messages import Row
from share_compute_actors.inference.planner import Planner
from share_compute_actors.inference.scheduler_service import SchedulerService
from share_compute_actors.inference.serving_group import ServingGroup
from share_compute_actors.inference.status_recorder import StatusRecorder

_LEFT = 0.8
"""Factor that is applied to a machine's fraction of cache memory each time the machine runs out of memory."""
_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0
"""Longest backoff of a machine after its member was lost, in seconds; the first backoff is `_PAUSE_S`."""
_LASTING_S = 300.0
"""Time in seconds since a member joined after which its loss resets the backoff of its machine."""
_PATIENCE_S = 120.0
"""Time in seconds without enough machines after which all sequences fail."""
_MOST_IN_VAIN = 5
"""Number of consecutive failures to link the members of planned stages, after which these members are removed."""
_log = logging.getLogger(__name__)


class Assembly:
    """Plans and forms the stages of one replica.

    Args:
        planner: finds the best placement.
        group: members, and the machines on which they may run.
        service: the scheduler service, which gets the limits of each epoch.
        status: status of the deployment.
        computation: the choice between compiled and eager code, which must exist before stages are formed.
    """

    def __init__(
        self,
        planner: Planner,
        group: ServingGroup,
        service: SchedulerService,
        status: StatusRecorder,
        computation: ComputationChooser,
    ) -> None:
        self._computation = computation
        self._planner = planner
        self._group = group
        self._offered = group.topology
        self._service = service
        self._status = status
        self.epoch = 0
        self._last_epoch = 0
        """Last epoch of the replica's earlier servers, as their members reported it; 0 if none did."""
        self.placement: Placement | None = None
        """The placement that serves now; None if there is none."""
        self._target: Placement | None = None
        """The placement that replaces `placement` as soon as all its members are ready; None if there is none."""
        self._tried: frozenset[Worker] = frozenset()
        """Members with which `_form_again` last tried to form stages; it does not try again with the same members."""
        self._memory_fractions: dict[Worker, float] = {}
        self._backoff = Backoff(_PAUSE_S, _LONGEST_PAUSE_S, _LASTING_S)
        self._paused: frozenset[Worker] = frozenset()
        """Machines that were in their backoff at the last call of `_plan`."""
        self._is_to_plan = True
        self._in_vain = 0
        self._was_ready = False
        self._lacking: str | None = None
        """Last known reason why no stages can be formed; None if there is none."""
        self._waits_since_s: float | None = None
        self._is_standby = False

    def attach(self) -> None:
        """Take over members that an earlier server of the replica left; `watch` then forms stages with them."""
        self._last_epoch = max(self._last_epoch, self._group.attach())
        self._was_ready |= bool(self._group.workers)

    def close(self) -> None:
        """End all members, and stop planning."""
        self._planner.close()
        self._group.dismiss()

    # -- called by `ReplicaRunner` -----------------------------------------------------------------------------------

    def name(self, worker: Worker) -> str:
        """Return the name of a machine."""
        return self._group.name(worker)

    def send(self, steps: list[EngineStep]) -> None:
        """Send engine steps to all stages."""
        assert self.placement is not None
        self._group.send(steps, self.placement.workers)

    def offer(self, topology: Topology) -> None:
        """Replace the set of machines that the replica may use."""
        self._offered = topology
        self._group.offer(topology)
        self.attach()
        self._is_to_plan = True

    def choose_computation(self, stored: Computation) -> None:
        """Compute with compiled or eager code, as the stored choice says; `watch` then forms stages."""
        self._computation.follow(stored)
        self._status.propose(None)
        self._tried = frozenset()

    def shrink(self, worker: Worker) -> None:
        """Reduce the KV capacity of a machine that ran out of memory, from the next epoch on.

        For an encoder, reduce the size of engine steps instead.
        """
        self._memory_fractions[worker] = _LEFT * self._memory_fractions.get(worker, 1.0)

    def is_from(self, worker: Any, key: Any) -> bool:
        """Return whether ``key`` is the key that was issued to this member."""
        return self._group.is_from(worker, key)

    def accuse(self, worker: Worker, failure: ShareComputeError) -> None:
        """Count a member as lost, because it sent invalid data."""
        self._group.detector.accuse(worker, failure)

    def expel(self, worker: Worker) -> None:
        """Remove a member that sent a wrong tensor, and begin the backoff of its machine."""
        self._group.remove([worker])
        self._lose([worker])

    def check_soon(self) -> None:
        """Shorten the time limit for heartbeats for a few seconds, after members reported a communication error."""
        self._group.detector.shorten_limit()

    @property
    def is_idle(self) -> bool:
        """Whether no member computes, according to the last heartbeats."""
        return not any(heartbeat.is_computing for heartbeat in self._group.detector.heartbeats.values())

    def break_up(self, why: str, lost: tuple[str, ...] = ()) -> None:
        """Stop serving with the current stages, if there are any.

        Args:
            why: reason, for users.
            lost: names of the lost machines.
        """
        if self.placement is not None:
            self.placement, self._tried = None, frozenset()
            self._status.lost(why, lost)
            self._status.set_state(DeploymentState.degraded, f"{why}; requests wait until others go on")

    def stand_by(self) -> None:
        """Break up the stages, and make members free their shards; keep their processes until `resume` is called.

        Raises:
            Cancelled: the replica was stopped.
        """
        self._is_standby = True
        self.placement = self._target = None
        self._group.invite(None)
        self._begin_epoch()
        try:
            self._group.unload()
        except MembersLost as loss:
            self._failed(loss.workers)
        self._status.standing_by()

    def resume(self) -> None:
        """End the standby, so that `watch` forms stages again."""
        if self._is_standby:
            self._is_standby, self._is_to_plan, self._tried = False, True, frozenset()
            self._status.set_state(DeploymentState.loading, "members load their shards again")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Check members, start members on planned machines, and form stages whose members are ready.

        Raises:
            Cancelled: the replica was stopped.
            UserError: the model cannot be served.
        """
        self._lose(self._group.check_members())
        if self._is_standby:
            self._group.end_left()
            offered = {machine.id for machine in self._offered.contributors}
            self._group.remove(self._group.workers - offered)
        else:
            self._take_in()
            # If there is only a proposal, stages are formed when the choice is stored.
            is_free = self._computation.proposal is None
            if self.placement is None and is_free:
                self._form_again()
            self._plan()
            if self._target is not None and is_free and self._group.workers.issuperset(self._target.workers):
                self._form(self._target)
            self._tidy()
            self._bound_wait()
        self._status.observe(self._group.workers, self._group.expected, self._group.detector.heartbeats)

    def _lose(self, workers: Collection[Worker]) -> None:
        if not workers:
            return
        lost = tuple(sorted(self.name(worker) for worker in workers))
        names = listed(lost)
        _log.warning("lost %s", names)
        for worker in workers:
            if fault := self._group.detector.take_fault(worker):
                _log.warning("%s", fault)
            self._backoff.lost(worker)
        if self.placement is not None and not set(self.placement.workers).isdisjoint(workers):
            self.break_up(f"lost {names}", lost)
        self._is_to_plan = True

    def _take_in(self) -> None:
        for worker, failure in self._group.take_in().items():
            _log.warning("%s does not serve: %s", self.name(worker), failure.message)
            if isinstance(failure, UserError):
                raise failure
            self._lacking = f"{self.name(worker)}: {failure.message}"
            self._backoff.lost(worker)
            self._is_to_plan = True

    def _form_again(self) -> None:
        """Form stages again from the current members, if the replica served before and they can hold the model."""
        there = self._group.workers
        if not there or there == self._tried or not self._was_ready:
            return
        self._tried = there
        with suppress(PlanInfeasible):
            self._form(self._planner.at_once(self._among(there), self.epoch + 1))

    def _plan(self) -> None:
        """Plan with all usable machines in the background, and start members for the resulting placement."""
        paused = self._backoff.paused
        self._is_to_plan |= paused != self._paused
        self._paused = paused
        if self._is_to_plan and not self._planner.is_busy:
            self._is_to_plan = False
            usable = {machine.id for machine in self._offered.contributors} - paused
            machines = self._among(usable | self._group.workers)
            self._planner.begin(machines, self.epoch + 1, is_first=not self._was_ready)
        try:
            wanted = self._planner.answer()
        except PlanInfeasible as lacking:
            if not paused or self._lacking is None:  # during a backoff, a known reason stays
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
        self._group.invite(wanted)
        if self.placement is not None:
            return
        if wanted is not None:
            coming = sorted(map(self.name, self._group.expected))
            loading = "stages are formed"
            if coming:
                loading = f"{listed(coming)} {'loads its' if len(coming) == 1 else 'load their'} layers"
            self._status.set_state(DeploymentState.loading, loading)
        else:
            state = DeploymentState.degraded if self._was_ready else DeploymentState.pending
            self._status.set_state(state, f"waiting for machines: {self._lacking}")

    def _begin_epoch(self) -> None:
        """Begin the next epoch, in which members drop their work for earlier epochs."""
        self.epoch = max(self.epoch, self._last_epoch) + 1
        self._group.halt(self.epoch)

    def _form(self, placement: Placement) -> None:
        """Try to form the stages of a placement; if that succeeds, serve with them from now on."""
        self.placement = None
        self._begin_epoch()
        workers = placement.workers
        try:
            self._group.load(placement)
            if not self._computation.is_chosen:
                self._status.set_state(DeploymentState.loading, "compiled code is measured beside eager code")
                self._computation.propose(workers, placement.concurrent)
                self._status.propose(self._computation.proposal)
                return
            limits = limits_of(
                self._planner.spec,
                placement,
                {worker: self._group.held[worker].holding for worker in workers},
                self._planner.window_tokens,
                self._memory_fractions,
                embeds=self._planner.embeds,
            )
            if len(workers) > 1:
                open_channels(self._group, self.epoch, workers, self._planner.channel, _log.info)
            self._group.begin(Row(self.epoch, workers, tuple(map(self.name, workers))))
        except MembersLost as loss:
            self._failed(loss.workers)
        except (ContributorLost, StaleEpoch) as failure:
            _log.warning("these stages could not be linked: %s", failure.message)
            self._in_vain += 1
            self._tried = frozenset()
            if self._in_vain >= _MOST_IN_VAIN:
                self._in_vain = 0
                self._failed(workers)
        except UserError:
            raise
        except ShareComputeError as failure:
            _log.warning("these stages cannot be formed: %s", failure.message)
            self._give_up(workers, failure)
        else:
            self._service.reform(self.epoch, limits)
            self._formed(placement.at(self.epoch))

    def _give_up(self, workers: Collection[Worker], failure: ShareComputeError) -> None:
        """Remove the member whose machine the error names; if the error names none of ``workers``, remove all."""
        self._lacking = failure.message
        self._failed([worker for worker in workers if self.name(worker) == failure.machine] or workers)

    def _failed(self, workers: Collection[Worker]) -> None:
        """Remove members that were lost or proved unusable."""
        self._target = None
        self._group.remove(workers)
        self._lose(workers)

    def _formed(self, placement: Placement) -> None:
        self.placement = placement
        if self._target is not None and self._target.shards == placement.shards:
            self._target = None
        self._backoff.joined(placement.workers)
        self._was_ready, self._in_vain, self._waits_since_s = True, 0, None
        self._service.open()
        self._status.formed(self.epoch, placement)
        self._status.set_state(DeploymentState.ready, placement.sentence)

    def _tidy(self) -> None:
        """End members that neither the current nor the next placement needs, as soon as both placements are known."""
        if self.placement is None or self._is_to_plan or self._planner.is_busy:
            return
        self._group.end_left()
        target = () if self._target is None else self._target.workers
        self._group.remove(self._group.workers.difference(self.placement.workers, target))

    def _bound_wait(self) -> None:
        """If machines have been lacking for too long, fail all sequences; reject new ones until stages are formed."""
        if self.placement is not None or self._target is not None or self._lacking is None:
            self._waits_since_s = None
            return
        now_s = time.monotonic()
        self._waits_since_s = self._waits_since_s or now_s
        if now_s - self._waits_since_s > _PATIENCE_S and self._service.is_open:
            self._service.close(
                Unavailable(
                    f"{self._planner.spec.name} lacks machines: {self._lacking}",
                    hint="try again when more machines have joined",
                )
            )
