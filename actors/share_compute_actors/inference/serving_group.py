"""Actor group of one replica, through which the replica's server starts, calls and removes members."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.errors import ShareComputeError, as_ours
from share_compute.inference.placement import Placement
from share_compute.inference.scheduler.engine_steps import EngineStep
from share_compute.protocol.membership import Worker
from share_compute.shards import Shard
from share_compute.specification import ServeJob
from share_compute_actors.compiled.choice import COMPILED_TIMES, CompiledTimes
from share_compute_actors.group.answering import answered
from share_compute_actors.group.exceptions import MembersLost
from share_compute_actors.group.naming import gpu_options, member_options, workers_of
from share_compute_actors.group.worker_group import WorkerGroup
from share_compute_actors.inference.assignment import ServingAssignment
from share_compute_actors.inference.member import ServingMember
from share_compute_actors.inference.messages import (
    HEARTBEAT,
    HELD,
    LAST_EPOCH,
    Held,
    Row,
    ServingCase,
    ServingSetup,
)
from share_compute_actors.inference.served_model import ServedModel
from share_compute_actors.wire import NOTHING

_MOST_MEASURED = 16
"""Most sequences of the engine step with which compiled and eager code are compared."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """A member that is starting: it loads its shard, and does not serve yet."""

    actor: Any
    shard: Shard
    loaded: Any
    """The pending Ray call that loads its shard."""


class ServingGroup(WorkerGroup):
    """Starts, calls and removes the members of one replica.

    Args:
        assignment: the deployment, and the machines on which members may run.
        model: blueprint and profile of the model's files.
        weights: the `ServedWeights` actor.
        server: the actor to which members send messages.
        cancelled: event that is set when the replica is stopped.
    """

    def __init__(
        self,
        assignment: ServingAssignment,
        model: ServedModel,
        weights: Any,
        server: Any,
        cancelled: threading.Event,
    ) -> None:
        super().__init__(assignment.topology, cancelled, HEARTBEAT, _log.warning)
        self._assignment = assignment
        self._model = model
        self._weights = weights
        self._server = server
        self._alive_calls: dict[Any, Worker] = {}
        """Pending `live` calls, with the member of each. A call ends when the member's process ends."""
        self._newcomers: dict[Worker, _Newcomer] = {}
        self._left = workers_of(assignment.replica_id)
        """Members of an earlier server of the replica that have not been taken over yet: actor -> worker."""
        self.held: dict[Worker, Held] = {}
        """State of each member's shard, as the member reported it."""
        self.detector.are_loading = False
        self.is_compiled = False
        """Whether members compute with compiled code from their next `load` on."""

    def cut_off(self, workers: frozenset[Worker]) -> frozenset[Worker]:
        """Return ``workers``, because all of them count as lost; other members can continue their sequences."""
        return workers

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def attach(self) -> int:
        """Take over members that an earlier server left, and return the last epoch that they know; 0 without members.

        A later call takes over members on machines that are not offered yet. Members with another setup are killed.
        """
        known = {machine.id for machine in self.topology.contributors}
        found: dict[Worker, Any] = {}
        for actor, worker in list(self._left.items()):
            if worker in known:
                del self._left[actor]
                if worker in found or worker in self._actors:
                    ray.kill(actor)
                else:
                    found[worker] = actor
        self._actors.update(found)
        calls = {
            worker: actor.follow.remote(self._server, self.issue_key(worker), self._setup(worker))
            for worker, actor in found.items()
        }
        try:
            epochs = self.gather(LAST_EPOCH, calls, skips_lost=True)
        except MembersLost:
            return 0
        self.remove([worker for worker, epoch in epochs.items() if epoch is None])
        self._alive_calls.update(
            {actor.live.remote(): worker for worker, actor in found.items() if worker in self._actors}
        )
        return max((epoch for epoch in epochs.values() if epoch is not None), default=0)

    def end_left(self) -> None:
        """Kill the members of an earlier server that were not taken over."""
        for actor in self._left:
            ray.kill(actor)
        self._left.clear()

    def _setup(self, worker: Worker) -> ServingSetup:
        machine = self.topology[worker]
        return ServingSetup(
            deployment=self._assignment.replica_id,
            worker=worker,
            name=machine.name,
            address=machine.address,
            blueprint=self._model.blueprint,
            dtype=self._assignment.spec.dtype,
            window_tokens=self._assignment.window_tokens,
            threads=machine.threads,
            device=machine.device.kind,
            gpus=tuple(device.uuid for device in machine.used),
            pooling=self._assignment.pooling,
            ranks=self._assignment.spec.parallelism.tensor,
            lent_devices=len(machine.group),
            measured=_measured(self._assignment.spec, self._assignment.window_tokens),
        )

    def _start(self, worker: Worker) -> Any:
        self._weights.open.remote()
        machine = self.topology[worker]
        return ServingMember.options(  # type: ignore[attr-defined]
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.node_id, soft=False),
            **member_options(self._assignment.replica_id, worker),
            **gpu_options(machine.device.kind, devices=len(machine.used)),
        ).remote(self._setup(worker), self._server, self.issue_key(worker))

    def invite(self, placement: Placement | None) -> None:
        """Start a member on each machine of the placement that has none, and begin to load its shard, without waiting.

        Kill starting members whose shard the placement does not have; kill all of them if ``placement`` is None.
        """
        shards = {} if placement is None else placement.shards
        for worker, newcomer in list(self._newcomers.items()):
            if shards.get(worker) != newcomer.shard:
                ray.kill(self._newcomers.pop(worker).actor)
        for worker in sorted(shards.keys() - self._newcomers.keys() - self._actors.keys()):
            assert placement is not None
            actor = self._start(worker)
            self._newcomers[worker] = _Newcomer(
                actor, shards[worker], self._load(actor, worker, placement, is_awaited=False)
            )

    def _load(self, actor: Any, worker: Worker, placement: Placement, *, is_awaited: bool) -> Any:
        keeps_plain = placement.memory_budgets[worker].holds_weights_twice
        shard = placement.shards[worker]
        return actor.load.remote(
            self._weights,
            shard,
            keeps_plain=keeps_plain,
            is_awaited=is_awaited,
            is_compiled=self.is_compiled,
        )

    @property
    def expected(self) -> frozenset[Worker]:
        """Machines on which members are starting."""
        return frozenset(self._newcomers)

    def take_in(self) -> dict[Worker, ShareComputeError]:
        """Add members that have loaded their shards to the group; kill those that failed, and return their errors."""
        refused: dict[Worker, ShareComputeError] = {}
        calls = {newcomer.loaded: worker for worker, newcomer in self._newcomers.items()}
        for call in ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if calls else ():
            worker = calls[call]
            newcomer = self._newcomers.pop(worker)
            try:
                self.held[worker] = answered(HELD, call, self.name(worker))
            except (RayError, ShareComputeError) as failure:
                ray.kill(newcomer.actor)
                refused[worker] = as_ours(failure)
            else:
                self._actors[worker] = newcomer.actor
                self._alive_calls[newcomer.actor.live.remote()] = worker
        return refused

    def remove(self, workers: Collection[Worker]) -> None:
        """Remove members from the group and kill their actors."""
        super().remove(workers)
        self._alive_calls = {
            call: worker for call, worker in self._alive_calls.items() if worker not in workers
        }
        for worker in workers:
            self.held.pop(worker, None)

    def dismiss(self) -> None:
        """Kill all members, including those that are starting and those of an earlier server."""
        self.end_left()
        self.invite(None)
        self.remove(tuple(self._actors))

    def check_members(self) -> frozenset[Worker]:
        """Remove and return lost members: ended processes at once, unresponsive ones after a time limit."""
        ended = (
            ray.wait(list(self._alive_calls), num_returns=len(self._alive_calls), timeout=0)[0]
            if self._alive_calls
            else []
        )
        dead = frozenset(self._alive_calls[call] for call in ended)
        self.remove(dead)
        return dead | super().check_members()

    # -- calls -------------------------------------------------------------------------------------------------------

    def halt(self, epoch: int) -> None:
        """Make all members drop their work for earlier epochs."""
        for actor in self._actors.values():
            actor.halt.remote(epoch)

    def load(self, placement: Placement) -> None:
        """Make members load their shards of a placement; they keep the parts that they already have.

        Raises:
            Cancelled: the replica was stopped.
            MembersLost: members were lost meanwhile.
            ShareComputeError: a member failed to load its shard.
        """
        self.detector.are_loading = True
        try:
            calls = {
                worker: self._load(self._actors[worker], worker, placement, is_awaited=True)
                for worker in placement.workers
            }
            self.held.update(self.gather(HELD, calls))
        finally:
            self.detector.are_loading = False

    def compare_compiled(self, workers: Collection[Worker], concurrent: int) -> list[CompiledTimes]:
        """Make members compile their shards, and return the times of eager and compiled code.

        Raises:
            Cancelled: the replica was stopped.
            CompilerFailed: a member cannot compile its shard.
            MembersLost: members were lost meanwhile.
        """
        self.detector.are_loading = True
        try:
            calls = {worker: self._actors[worker].compare_compiled.remote(concurrent) for worker in workers}
            return list(self.gather(COMPILED_TIMES, calls).values())
        finally:
            self.detector.are_loading = False

    def unload(self) -> None:
        """Make all members free their shards and KV caches.

        Raises:
            Cancelled: the replica was stopped.
            MembersLost: members were lost meanwhile.
        """
        self.ask(NOTHING, sorted(self.workers), "unload")

    def begin(self, row: Row) -> None:
        """Make members start to execute the engine steps of an epoch.

        Raises:
            Cancelled: the replica was stopped.
            MembersLost: members were lost meanwhile.
        """
        self.ask(NOTHING, row.workers, "begin", row)

    def send(self, steps: list[EngineStep], workers: Collection[Worker]) -> None:
        """Send engine steps to those of ``workers`` that are still in the group, without waiting for an answer."""
        for worker in workers:
            if worker in self._actors:
                self._actors[worker].take.remote(steps)


def _measured(spec: ServeJob, window_tokens: int) -> ServingCase:
    """Return the engine step for comparing compiled with eager code, according to the deployment's objective."""
    sequences = 1 if spec.objective == "latency" else min(spec.max_concurrent, _MOST_MEASURED)
    return ServingCase(sequences, min(spec.prompt_tokens, window_tokens - 1))
