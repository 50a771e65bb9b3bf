"""Runs one deployment: starts its replicas, gives them machines, records their status, and ends them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from share_compute.data.tokenization import has_chat_template
from share_compute.errors import (
    Conflict,
    ContributorLost,
    NotFound,
    Unavailable,
    UserError,
    VerificationFailed,
)
from share_compute.inference.autoscaler import Autoscaler, Decision
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import Interruption, ServingStatus
from share_compute.lifecycle.states import ContributorState
from share_compute.models.configuration import declared_config
from share_compute.models.huggingface.encoder_types import Pooling, pooling_of
from share_compute.planning.plan import Plan
from share_compute.specification import ModelSpec
from share_compute.specification.placement.selection import SelectionSpec
from share_compute.store import ContributorRecord, DeploymentRecord, Store
from share_compute.topology import Topology
from share_compute_api.control import ARRIVING
from share_compute_api.control.deployments.replica_set import ManagedReplica, ReplicaSet
from share_compute_api.control.deployments.replicas import nodes
from share_compute_api.control.machines.live_topology import live_topology
from share_compute_api.openai.engine import Engines, ModelFacts
from share_compute_api.openai.metering import ServingMetrics
from share_compute_api.openai.ray_engine import RayEngine
from share_compute_api.openai.replica import LaunchReplica, Replica
from share_compute_api.schemas.bodies import ReplicaCounts
from share_compute_api.submission.deployments import model_folder
from share_compute_api.submission.model_folders import model_window

POLL_S = 0.5
HURRIED_POLL_S = 0.1
"""Pause between two polls while a replica's server that was just started is not ready, in seconds.

Clients wait for the replica, for example after a restart of this process."""
HURRIED_S = 30.0
"""Time after the start of a replica's server for which the pauses are `HURRIED_POLL_S`, in seconds."""
_ANSWER_S = 20.0
"""Seconds to wait for the status of a replica's server, which may still be starting on a busy machine."""
_MOST_FAILURES = 5
"""Number of failures of one replica, without becoming ready in between, after which the deployment fails."""
_FOR_USERS = frozenset({UserError.code, NotFound.code, Conflict.code})
"""Codes of errors after which the deployment fails at once, because a restart cannot help."""
_RESTARTED = "the server was restarted"
_STARTS = "its server starts"
_FIRST = "it was deployed"
_PRESENT = (ContributorState.ready, ContributorState.draining)
Members: TypeAlias = Callable[[], Awaitable[Mapping[str, Collection[str]]]]
_log = logging.getLogger(__name__)


class _Failed(Exception):
    """Raised when the deployment must fail, because another restart of a replica would not help."""

    def __init__(self, reason: str, error: dict[str, Any]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


def poll_pause_s(age_s: float, *, is_starting: bool) -> float:
    """Return the pause before the next poll of a deployment's replicas, in seconds.

    Args:
        age_s: time since a replica's server was started last, in seconds.
        is_starting: whether a replica that stays is not ready.
    """
    return HURRIED_POLL_S if is_starting and age_s < HURRIED_S else POLL_S


class Serving:
    """Supervises one deployment.

    Args:
        store: the store of deployments and machines.
        engines: the registry in which requests find the engine.
        launch: starts a replica.
        members: returns, for each contributor, the jobs whose members occupy memory there.
        metrics: the Prometheus metrics of requests.
        record: the deployment's record; `revise` replaces its specification.
        drain_s: seconds for a draining replica to finish its sequences.
    """

    def __init__(
        self,
        store: Store,
        engines: Engines,
        launch: LaunchReplica,
        members: Members,
        metrics: ServingMetrics,
        record: DeploymentRecord,
        drain_s: float,
    ) -> None:
        self._members = members
        self._store = store
        self._engines = engines
        self._launch = launch
        self._metrics = metrics
        self._record = record
        self._spec = record.spec
        self._computation = record.computation
        """Stored choice between compiled and eager code; None before the choice."""
        self._autoscaler = Autoscaler(record.spec.replicas, record.spec.max_concurrent, _wanted_first(record))
        self._scaled = _FIRST
        """Reason for the current target number of replicas."""
        self._unrecorded: tuple[int, Decision] | None = None
        """Scaling decision that is not recorded in the store yet: (number of replicas before, decision)."""
        self._waits = ""
        """Reason why no machine is available for a replica; empty if a machine is available."""
        self._replicas = ReplicaSet(record.spec.parallelism.stages, drain_s)
        self._folder = Path()
        self._window_tokens = 0
        self._pooling: Pooling | None = None
        self._engine: RayEngine | None = None
        self._recorded: tuple[DeploymentState, str, list[Plan]] | None = None
        self._started_s = -math.inf
        """Last start of a replica's server, in seconds on the event loop's clock."""
        self._is_in_trouble = False
        """Whether the last poll failed."""
        self.is_scaled = False
        """Whether the number of replicas was set to the wanted number at least once, so that `numbers` is complete."""
        self.is_ending = False
        """Whether the deployment is ending its replicas or was cancelled; if so, do not cancel its task again."""

    @property
    def statuses(self) -> list[ServingStatus]:
        """Last status of each replica that has reported one."""
        return self._replicas.statuses

    @property
    def numbered(self) -> dict[int, ServingStatus]:
        """Replica number -> last status, for the replicas that reported one."""
        return {
            managed.number: managed.slot.status
            for managed in self._replicas
            if managed.slot.status is not None
        }

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the replicas, including those that are ending."""
        return frozenset(managed.number for managed in self._replicas)

    @property
    def name(self) -> str:
        """Name that clients send as ``model``."""
        return self._spec.name

    @property
    def replicas(self) -> ReplicaCounts:
        """Numbers of replicas by state and of waiting sequences, and the reason for the wanted number of replicas."""
        staying = self._replicas.staying
        return ReplicaCounts(
            ready=sum(managed.slot.is_ready for managed in staying),
            wanted=self._autoscaler.wanted,
            draining=sum(not managed.stays and not managed.is_standby for managed in self._replicas),
            standby=sum(managed.is_standby for managed in self._replicas),
            waiting=self._engine.demand.waiting if self._engine is not None else 0,
            reason=self._scaled,
        )

    def revise(self, record: DeploymentRecord) -> None:
        """Apply a changed specification. Only the number or range of replicas can change."""
        self._spec = record.spec

    async def run(self) -> None:
        """Serve until cancelled or failed; then end all replicas."""
        try:
            await self._begin()
            while True:
                await self._poll()
                is_starting = any(not managed.slot.is_ready for managed in self._replicas.staying)
                age_s = asyncio.get_running_loop().time() - self._started_s
                await asyncio.sleep(poll_pause_s(age_s, is_starting=is_starting))
        except UserError as failure:
            error = {"code": failure.code, **failure.facts()}
            await self._move(DeploymentState.failed, failure.message, error=error)
        except _Failed as failure:
            await self._move(DeploymentState.failed, failure.reason, error=failure.error)
        finally:
            await self._end()

    # -- beginning and end -------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        self._folder = await asyncio.to_thread(model_folder, self._spec.model, self._store)
        config = await asyncio.to_thread(declared_config, ModelSpec(path=self._folder))
        from share_compute.inference.placement import window_of

        self._pooling = await asyncio.to_thread(pooling_of, self._folder, config)
        is_stretched = self._spec.max_seq is not None
        self._window_tokens = window_of(
            self._spec, model_window(self._folder, config, is_stretched=is_stretched)
        )
        created = int(self._record.created_at.timestamp())
        kind: Literal["generate", "embed"] = "generate" if self._pooling is None else "embed"
        can_chat = await asyncio.to_thread(has_chat_template, self._folder)
        facts = ModelFacts(
            self._spec.name,
            kind,
            created,
            self._window_tokens,
            self._folder,
            can_chat,
            self._spec.tool_format,
            self._record.id,
        )
        if not self._autoscaler.wanted:  # no replica has to be restarted
            self._recorded, self._scaled = (self._record.state, self._record.reason, []), _RESTARTED
        elif self._record.state is not DeploymentState.pending:
            await self._move(DeploymentState.pending, _RESTARTED, plans=[])
        self._engine = RayEngine(facts, self._metrics.of(self._spec.name))
        self._engines.add(self._engine)
        # Clients that resume their streams after a restart of the server wait for the tokenizer.
        self._engines.load_tokenizer(self._engine)

    async def _end(self) -> None:
        self.is_ending = True
        gone = Unavailable(f"{self._spec.name} is not served any more", hint="name another model")
        if self._engine is not None:
            if self._engines.find(self._spec.name) is self._engine:
                self._engines.remove(self._spec.name)
            await self._engine.close(gone)
        for managed in self._replicas:
            if managed.ending is None:
                managed.end()
        endings = [managed.ending for managed in self._replicas if managed.ending is not None]
        await asyncio.gather(*endings, return_exceptions=True)
        await asyncio.to_thread(self._store.leases.release_all, self._record.id)

    async def _move(self, state: DeploymentState, reason: str, **facts: Any) -> None:
        """Record the state; ignore a conflict, because the deployment may have been taken down in the meantime."""
        try:
            await asyncio.to_thread(
                self._store.deployments.set_state, self._record.id, state, reason, **facts
            )
        except Conflict as over:
            _log.info("%s", over.message)

    # -- one poll ----------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        try:
            for managed in self._replicas:
                await self._see(managed)
            await self._scale()
            await self._give_machines()
        except (ContributorLost, Unavailable, VerificationFailed) as failure:
            # The next polls may fail in the same way, each with other ids in the message.
            if not self._is_in_trouble:
                _log.warning("deployment %s: %s", self._spec.name, failure.message)
            self._is_in_trouble = True
        else:
            self._is_in_trouble = False
        await self._record_state()

    async def _see(self, managed: ManagedReplica) -> None:
        """Poll a replica's status; restart the replica if its process died, does not answer, or reports a failure.

        Raises:
            _Failed: a restart cannot help, or the replica failed `_MOST_FAILURES` times without becoming ready.
        """
        now_s = asyncio.get_running_loop().time()
        if managed.replica is None:
            return
        assert self._engine is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                status = await managed.replica.status()
        except (ContributorLost, TimeoutError) as failure:
            _log.warning("the server of a replica of %s is restarted: %s", self._spec.name, failure)
            self._drop(managed)
            await self._record_interruptions(managed, managed.interruptions.died(now_s))
            return
        managed.slot.see(status, now_s)
        if status.proposed_computation is not None:
            await self._choose_computation(managed.replica, status.proposed_computation)
        await self._record_interruptions(managed, managed.interruptions.news(status, now_s))
        self._engine.see(managed.replica, status.predicted_tokens_per_s, is_ready=managed.slot.is_ready)
        if status.state is DeploymentState.ready:
            managed.failures = 0
        elif status.state.is_final:
            managed.failures += 1
            error = status.error or {}
            if error.get("code") in _FOR_USERS or managed.failures >= _MOST_FAILURES:
                raise _Failed(status.reason, error)
            self._drop(managed)

    async def _choose_computation(self, replica: Replica, proposed: Computation) -> None:
        """Store the choice between compiled and eager code that a replica proposes, and send it the stored choice.

        The first proposal of a deployment is stored, so that all its replicas compute the same bits.
        """
        if self._computation is None:
            record = await asyncio.to_thread(
                self._store.deployments.choose_computation, self._record.id, proposed
            )
            self._computation = record.computation
        assert self._computation is not None
        await replica.choose_computation(self._computation)

    async def _record_interruptions(self, managed: ManagedReplica, news: Sequence[Interruption]) -> None:
        """Record in the store that the replica was interrupted, or that it has resumed."""
        deployments = self._store.deployments
        for one in news:
            record = deployments.interrupted if one.seconds is None else deployments.went_on
            await asyncio.to_thread(record, self._record.id, managed.number, one)

    def _drop(self, managed: ManagedReplica) -> None:
        """End a replica's server. The members keep running for the next server, unless the failed server ended them."""
        replica, managed.replica, managed.offered = managed.replica, None, frozenset()
        managed.slot.see(None, asyncio.get_running_loop().time())
        if replica is not None:
            assert self._engine is not None
            self._engine.remove(replica)
            replica.abandon()

    async def _scale(self) -> None:
        """Apply the autoscaler's decision: add or drain replicas, and end replicas that have drained."""
        assert self._engine is not None
        engine, now_s = self._engine, asyncio.get_running_loop().time()
        limits, before = self._spec.replicas, self._autoscaler.wanted
        engine.patience_s = limits.cold_start_timeout_s
        if limits != self._autoscaler.limits:
            decision = self._autoscaler.limit(limits)
        else:
            decision = self._autoscaler.decide(engine.demand, now_s)
        if decision is not None:
            self._unrecorded, self._scaled = (before, decision), decision.reason
        if self._unrecorded is not None:
            before, decision = self._unrecorded
            await asyncio.to_thread(
                self._store.deployments.scaled, self._record.id, before, decision.wanted, decision.reason
            )
            self._unrecorded = None
        for managed in self._replicas.fit(self._autoscaler.wanted, now_s, engine.ongoing):
            if managed.replica is not None:
                engine.retire(managed.replica, is_draining=not managed.stays)
        for managed in self._replicas.done(now_s, engine.ongoing):
            if limits.reserve and await self._keep_on_standby(managed):
                continue
            if managed.replica is not None:
                engine.remove(managed.replica)
            managed.end()
        for managed in self._replicas.staying:
            if managed.is_standby and managed.replica is not None:
                await managed.replica.set_standby(is_on=False)
            managed.is_standby = False
        self._replicas.forget_ended()
        self.is_scaled = True

    async def _keep_on_standby(self, managed: ManagedReplica) -> bool:
        """Put a ready replica on standby, unless another replica is on standby; return whether it is on standby now."""
        if not managed.is_standby:
            if managed.replica is None or not managed.slot.is_ready:
                return False
            if any(other.is_standby for other in self._replicas):
                return False
            await managed.replica.set_standby(is_on=True)
            managed.is_standby = True
        return True

    async def _give_machines(self) -> None:
        now_s = asyncio.get_running_loop().time()
        found = await asyncio.to_thread(self._store.contributors.list, (*_PRESENT, *ARRIVING))
        present = {machine.id: machine for machine in found if machine.state in _PRESENT}
        selection = self._spec.parallelism
        unwanted = {machine.id for machine in present.values() if not selection.allows(machine)}
        for managed in self._replicas:
            managed.slot.settle(present, now_s, unwanted)
        held = [machine for machine in present.values() if machine.deployment_id == self._record.id]
        used = {one for managed in self._replicas for one in (*managed.slot.machines, *managed.slot.parting)}
        idle = {machine.id: machine for machine in held if machine.id not in used}
        leaving = {
            one
            for one, machine in idle.items()
            if machine.state is ContributorState.draining or one in unwanted
        }
        free = [machine for one, machine in present.items() if _is_free(machine) and one not in unwanted]
        staying = self._replicas.staying
        self._waits = "" if idle or free else why_none(found, selection)
        usable = [machine for one, machine in idle.items() if one not in leaving]
        wanting = next((managed for managed in staying if managed.slot.wants([*usable, *free])), None)
        if wanting is not None and free:
            kept = await self._members()
            # A lost machine has no lease. After a restart of the server it may still have members of this replica,
            # which continue.
            own = {f"{self._record.id}/{wanting.number}"}
            free = [machine for machine in free if own.issuperset(kept.get(machine.id, ()))]
        if wanting is not None:
            taken = [machine.id for machine in free]
            held = await asyncio.to_thread(self._store.leases.take, self._record.id, taken)
            wanting.slot.give((machine.id for machine in held if machine.id not in used | leaving), now_s)
        surplus = leaving if wanting is not None else idle.keys()
        if surplus:
            await asyncio.to_thread(self._store.leases.release, self._record.id, set(surplus))
        for managed in self._replicas:
            machines = [present[one] for one in sorted(managed.slot.machines & present.keys())]
            await self._offer(managed, machines)

    async def _offer(self, managed: ManagedReplica, machines: Sequence[ContributorRecord]) -> None:
        known = nodes(machines)
        if managed.replica is None:
            if not managed.stays and not managed.is_standby:
                return
            managed.replica = await self._start(managed, self._topology(machines))
        elif known != managed.offered:
            await managed.replica.offer(self._topology(machines))
        managed.offered = known

    def _topology(self, machines: Sequence[ContributorRecord]) -> Topology:
        return live_topology(machines, self._spec.parallelism.ranks)

    async def _start(self, managed: ManagedReplica, topology: Topology) -> Replica:
        from share_compute_actors.inference.assignment import ServingAssignment

        assert self._engine is not None
        replica = await self._launch(
            ServingAssignment(
                deployment_id=self._record.id,
                replica=managed.number,
                spec=self._spec,
                folder=self._folder,
                window_tokens=self._window_tokens,
                pooling=self._pooling,
                topology=topology,
                computation=self._computation,
                is_standby=managed.is_standby,
            )
        )
        self._started_s = asyncio.get_running_loop().time()
        self._engine.add(replica)
        if managed.is_standby:
            self._engine.retire(replica)
        return replica

    async def _record_state(self) -> None:
        """Record the deployment's state, derived from the statuses of the wanted replicas."""
        assert self._engine is not None
        statuses = [managed.slot.status for managed in self._replicas.staying]
        lacks = all(not managed.slot.machines for managed in self._replicas.staying)
        state, reason = standing_of(
            statuses, self._spec.replicas.min, self._scaled, self._waits if lacks else ""
        )
        self._engine.reason = reason
        placed = [status.prediction for status in statuses if status is not None]
        plans = [prediction.plan for prediction in placed if prediction is not None]
        if (state, reason, plans) == self._recorded:
            return
        is_new = self._recorded is None or self._recorded[0] is DeploymentState.pending
        if is_new and state not in (DeploymentState.pending, DeploymentState.loading):
            # The replica finished loading between two polls, but the store allows this state only after `loading`.
            await self._move(DeploymentState.loading, _STARTS)
        await self._move(state, reason, plans=plans)
        self._recorded = state, reason, plans


def why_none(machines: Iterable[ContributorRecord], selection: SelectionSpec) -> str:
    """Return the reason why no machine is free.

    Args:
        machines: those that are joining, being measured, ready or draining.
        selection: the machines that the deployment may use.
    """
    allowed = [machine for machine in machines if selection.allows(machine)]
    ready = [machine for machine in allowed if machine.state is ContributorState.ready]
    arriving = sum(machine.state in ARRIVING for machine in allowed)
    if not ready and arriving:
        return f"no machine is ready, {arriving} {'is' if arriving == 1 else 'are'} about to be"
    if not ready and selection.words:
        return f"waits for {selection.words}"
    if not ready:
        return "no machine is there; let machines join"
    training = sum(machine.job_id is not None for machine in ready)
    serving = sum(machine.deployment_id is not None for machine in ready)
    work = [f"{training} in training"] * bool(training) + [f"{serving} serving"] * bool(serving)
    return f"no machine is free: {' and '.join(work)}"


def standing_of(
    replicas: Sequence[ServingStatus | None], fewest: int, scaled: str, waits: str = ""
) -> tuple[DeploymentState, str]:
    """Return the state of a deployment, and the reason for the state.

    Args:
        replicas: status of each wanted replica; None if unknown.
        fewest: minimum number of replicas. If at least this many are ready, the deployment is not degraded.
        scaled: reason for the target number of replicas.
        waits: reason why no machine is available for the replicas; empty if a machine is available.
    """
    if not replicas:
        return DeploymentState.ready, f"no replica is up: {scaled}; the next request starts one"
    ready = [status for status in replicas if status is not None and status.state is DeploymentState.ready]
    others = [status for status in replicas if status is None or status not in ready]
    if not others:
        several = f"{len(replicas)} replicas answer"
        return DeploymentState.ready, several if len(replicas) > 1 else ready[0].reason
    first = others[0]
    reason = waits or (_STARTS if first is None or first.state.is_final else first.reason)
    if ready:
        answering = f"{len(ready)} of {len(replicas)} replicas answer; {reason}"
        return DeploymentState.ready if len(ready) >= fewest else DeploymentState.degraded, answering
    state = DeploymentState.pending if first is None or first.state.is_final else first.state
    return state, reason


def _wanted_first(record: DeploymentRecord) -> int:
    """Return the initial number of replicas, which the autoscaler then clamps to the deployment's range.

    A deployment that was ready or degraded before the server's restart gets one replica for each recorded plan. If it
    keeps a replica on standby, it gets at least that one, which takes over the members on standby. Any other deployment
    starts with one replica, which shows whether the model can be served.
    """
    if record.state in (DeploymentState.ready, DeploymentState.degraded):
        return max(len(record.plans), record.spec.replicas.reserve)
    return 1


def _is_free(machine: ContributorRecord) -> bool:
    return machine.state is ContributorState.ready and not machine.is_leased
