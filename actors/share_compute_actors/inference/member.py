"""A member of a deployment: the actor that holds one shard, and the KV caches of sequences, on one contributor.

The replica's server imports this module when it finds the members that an earlier server left. To keep this import
fast, only the methods import torch.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import ray

from share_compute.errors import ShareComputeError
from share_compute.inference.scheduler.engine_steps import EngineStep
from share_compute.shards import Shard
from share_compute_actors.compiled.choice import COMPILED_TIMES, CompiledTimes
from share_compute_actors.group.answering import answers
from share_compute_actors.group.lifeline import Lifeline
from share_compute_actors.group.linked_member import LinkedMember
from share_compute_actors.inference.messages import (
    HEARTBEAT,
    HELD,
    LAST_EPOCH,
    Heartbeat,
    Held,
    Row,
    ServingSetup,
    ToServer,
    Trouble,
    pack_to_server,
)
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.wire import NOTHING

if TYPE_CHECKING:
    from share_compute_actors.inference.compiled_stage import StageCompiler
    from share_compute_actors.inference.ranks import ServingRanks
    from share_compute_actors.inference.step_engine import StepEngine

_RANK_DEADLINE_S = 120.0
"""Longest wait of the ranks of a member for each other, in seconds."""
_log = logging.getLogger(__name__)


@ray.remote(num_cpus=0, concurrency_groups={"orders": 1, "steps": 1, "control": 2, "mail": 2, "life": 1})
class ServingMember(LinkedMember):
    """Actor that holds and computes one shard of a deployment's replica. Its shard may change with each epoch.

    Methods of Ray's concurrency group ``orders`` wait for the compute thread. The other methods do not.

    Args:
        setup: parameters of this member.
        server: the `DeploymentServer` actor that leads this member.
        key: secret that the member sends with each message to the server.
    """

    _setup: ServingSetup
    _engine: StepEngine

    _last_message_s = 2.0

    def __init__(self, setup: ServingSetup, server: Any, key: bytes) -> None:
        from share_compute_actors.inference.step_engine import StepEngine  # noqa: PLC0415 - loads torch
        from share_compute_actors.machine.device import end_if_lost  # noqa: PLC0415 - loads torch

        close_stalled_connections()
        self._setup = setup
        self._server = server, key
        self._outgoing: queue.SimpleQueue[ToServer] = queue.SimpleQueue()
        self._engine = StepEngine(self._outgoing.put, partial(end_if_lost, setup.device, self._end))
        self._stage_compiler: StageCompiler | None = None
        self._ranks: ServingRanks | None = None
        if setup.ranks > 1:
            from share_compute_actors.group.ranks.processes import RankDevices  # noqa: PLC0415 - loads torch
            from share_compute_actors.inference.ranks import ServingRanks  # noqa: PLC0415 - loads torch

            self._ranks = ServingRanks(
                *(setup.ranks, setup.threads, _RANK_DEADLINE_S, self._end),
                RankDevices.of(setup.device, setup.lent_devices),
            )
        self._lifeline: Lifeline | None = None
        threading.Thread(target=self._notify, name="notify", daemon=True).start()

    def _notify(self) -> None:
        """Send queued messages to the server.

        This method has its own thread, because a Ray call on the compute thread would delay the next token.
        """
        try:
            while True:
                messages = [pack_to_server(self._outgoing.get())]
                with suppress(queue.Empty):
                    while True:
                        messages.append(pack_to_server(self._outgoing.get_nowait()))
                server, key = self._server
                server.receive.remote(self._setup.worker, key, messages)
        except BaseException:  # noqa: BLE001 - this thread sends no messages after an error
            _log.exception("%s cannot send its results to the server, and exits", self._setup.name)
            os._exit(1)  # the server notices the end of this process at once, by its pending call of `live`

    def _report_loss(self, lost: ShareComputeError) -> Any:
        server, key = self._server
        trouble = pack_to_server(Trouble(self._engine.epoch, lost))
        return server.receive.remote(self._setup.worker, key, [trouble])

    # -- between epochs ----------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="orders")
    @answers(HELD)
    def load(
        self, weights: Any, shard: Shard, *, keeps_plain: bool, is_awaited: bool, is_compiled: bool
    ) -> Held:
        """Load a shard, and drop the previous one. Tensors that both shards have are kept.

        Args:
            weights: the `ServedWeights` actor.
            shard: layers of the model.
            keeps_plain: whether packed and plain copies of weights may be kept; see `EngineStage.seal`.
            is_awaited: whether sequences wait for this member. The new shard of a text model is then sealed later, by
                the `StepEngine`.
            is_compiled: whether the deployment computes with compiled code. The shard is then sealed and compiled now.

        Raises:
            CompilerFailed: this machine cannot compile the shard.
            ContributorLost: weights arrived damaged, this process does not see the GPU that was measured, or a rank
                was lost.
            ShardStoreLost: the `ServedWeights` actor died.
            PlanInfeasible: the shard does not fit into this machine's memory.
            UserError: the model cannot be served, or its weights do not belong to its configuration.
        """
        from share_compute_actors.inference.loading import load_shard  # noqa: PLC0415 - loads torch

        engine = self._engine
        return engine.order(
            partial(
                load_shard,
                *(engine, self._setup, weights, shard, self._ranks, self._compiler(is_used=is_compiled)),
                keeps_plain=keeps_plain,
                is_awaited=is_awaited,
            )
        )

    @ray.method(concurrency_group="orders")
    @answers(COMPILED_TIMES)
    def compare_compiled(self, concurrent: int) -> CompiledTimes:
        """Compile the shard, and return the times of an engine step with eager and with compiled code.

        Raises:
            CompilerFailed: the shard cannot be compiled, or its results differ.
        """
        from share_compute_actors.inference.loading import seal_now  # noqa: PLC0415 - loads torch

        compiler, engine = self._compiler(is_used=True), self._engine
        assert compiler is not None
        return engine.order(lambda: compiler.compare(seal_now(engine), concurrent))

    def _compiler(self, *, is_used: bool) -> StageCompiler | None:
        """Return the compiler of the shard if ``is_used``; otherwise let the shard compute eagerly and return None."""
        if is_used and self._stage_compiler is None:
            from share_compute_actors.inference.compiled_stage import StageCompiler  # noqa: PLC0415 - loads torch

            self._stage_compiler = StageCompiler(self._setup)
        if not is_used and self._stage_compiler is not None:
            self._engine.order(self._stage_compiler.drop)
        return self._stage_compiler if is_used else None

    @ray.method(concurrency_group="orders")
    @answers(NOTHING)
    def unload(self) -> None:
        """Free the shard and its KV caches; the process stays, so that a later `load` need not start one."""
        from share_compute_actors.group.allocator import trim  # noqa: PLC0415 - loads torch

        self._engine.order(self._engine.unload)
        if self._stage_compiler is not None:
            self._stage_compiler.drop()
        if self._ranks is not None:
            self._engine.order(self._ranks.drop)
        trim()

    @ray.method(concurrency_group="orders")
    @answers(NOTHING)
    def begin(self, row: Row) -> None:
        """Start to execute the engine steps of an epoch, with empty KV caches."""
        self._engine.order(partial(self._engine.begin, row, row.workers.index(self._setup.worker)))

    # -- answered at any time ----------------------------------------------------------------------------------------

    @ray.method(concurrency_group="steps")
    def take(self, steps: list[EngineStep]) -> None:
        """Queue engine steps, in the order of their ids."""
        self._engine.put(steps)

    @ray.method(concurrency_group="control")
    @answers(LAST_EPOCH)
    def follow(self, server: Any, key: bytes, setup: ServingSetup) -> int | None:
        """Send messages to another server of the replica from now on, and return the last epoch that this member knows.

        If the setup is not the one that this member was started with, return None instead.

        Args:
            server: the `DeploymentServer` actor that leads this member from now on.
            key: secret to send with each message.
            setup: parameters with which the server would start this member.
        """
        if setup != self._setup:
            return None
        self._server = server, key
        return self._engine.last_epoch

    @ray.method(concurrency_group="control")
    def halt(self, epoch: int) -> None:
        """Drop the engine steps of epochs before ``epoch``, and interrupt a wait for their tensors."""
        self._engine.halt(epoch)

    @ray.method(concurrency_group="control")
    @answers(HEARTBEAT)
    def status(self) -> Heartbeat:
        """Return a heartbeat with this member's activity; each call restarts the time limit of `Lifeline`."""
        # The server sends requests only after the first shard was loaded, which may take longer than the limit.
        if self._lifeline is None:
            self._lifeline = Lifeline()
        self._lifeline.pull()
        stage = self._engine.stage
        return Heartbeat(
            worker=self._setup.worker,
            epoch=self._engine.epoch,
            process_id=os.getpid(),
            is_computing=self._engine.is_computing,
            computed_s=self._engine.computed_s,
            at_s=time.monotonic(),
            resident_bytes=psutil.Process().memory_info().rss
            + (0 if self._ranks is None else self._ranks.resident_bytes),
            cache_bytes=0 if stage is None else stage.held_tokens * stage.bytes_per_token,
        )

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Block forever; the call fails when this process ends, which notifies the caller."""
        threading.Event().wait()
