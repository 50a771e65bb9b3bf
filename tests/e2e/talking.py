"""Deployments that speak from real weights in this process: the supervisor, the scheduler and the layers are the real
ones; machines are rows in the store, and a test says when one of them dies."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import torch
from fastapi import FastAPI
from tests.e2e.conftest import Server

from share_compute.inference.placement import Placement, limits_before
from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.scheduler.engine_steps import EngineStep, SampledToken, StepResult
from share_compute.inference.scheduler.events import SequenceEvent
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.options import Generation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.models.configuration import declared_config
from share_compute.planning.plan import Bottleneck, MemberPlan, Plan, StagePlan
from share_compute.planning.report import ServingPrediction
from share_compute.shards import Shard
from share_compute.specification import ModelSpec
from share_compute.topology import Topology
from share_compute_actors.inference.assignment import ServingAssignment
from share_compute_actors.inference.messages import Heartbeat
from share_compute_actors.inference.scheduler_service import SchedulerService
from share_compute_actors.inference.status_recorder import StatusRecorder
from share_compute_api.control.deployments.deployments import DeploymentSupervisor

LAYERS = 4
WINDOW = 1024
_PULL_S = 0.2


async def no_members() -> dict[str, list[str]]:
    """Return the members of jobs by machine: none."""
    return {}


class TalkingServer(Server):
    """The control plane with a supervisor of deployments, whose replicas are `Talker`."""

    def make_app(self) -> FastAPI:
        app = super().make_app()
        self.talkers: dict[str, Talker] = {}
        context = app.state.context
        context.deployments = DeploymentSupervisor(
            context.store,
            context.engines,
            self._launch,
            context.notifier,
            context.metrics.serving,
            no_members,
            120.0,
        )
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with inner(app):
                context.spawn(context.deployments.run())
                yield

        app.router.lifespan_context = lifespan
        return app

    async def _launch(self, assignment: ServingAssignment) -> Talker:
        talker = Talker(assignment)
        await talker.offer(assignment.topology)
        self.talkers[assignment.spec.name] = talker
        return talker


class Talker:
    """One replica: a row of stages, one for each machine that it was offered, all computed by one thread."""

    def __init__(self, assignment: ServingAssignment) -> None:
        self._assignment = assignment
        self._news = threading.Condition()
        self._service = SchedulerService(limits_before(assignment.spec, assignment.window_tokens), self._wake)
        self._status = StatusRecorder(self._service, assignment.window_tokens)
        self._status.set_state(DeploymentState.pending, "waiting for machines: none is there")
        self._config = declared_config(ModelSpec(path=assignment.folder))
        self._names: dict[str, str] = {}
        self._row: list[ServingStage] = []
        self._fed_back: dict[int, int] = {}
        self._epoch = 0
        self._workers: tuple[str, ...] = ()
        self._computed_s: deque[tuple[float, float]] = deque([(0.0, time.monotonic())])
        self.steps_left: float = float("inf")
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- called by tests -------------------------------------------------------------------------------------------

    def allow(self, steps: float) -> None:
        """Compute ``steps`` more steps, then wait."""
        with self._news:
            self.steps_left = steps
            self._news.notify_all()

    def lose(self, name: str) -> None:
        """Lose a machine: nothing is computed until `go_on`."""
        with self._news:
            self._row = []
            self._status.lost(f"lost {name}", (name,))
            self._status.set_state(DeploymentState.degraded, f"lost {name}; requests wait until others go on")
            self._workers = tuple(one for one in self._workers if self._names[one] != name)

    def go_on(self) -> None:
        """Let the remaining members load the lost shards, and continue."""
        with self._news:
            self._form(self._workers)

    # -- called by the supervisor ----------------------------------------------------------------------------------

    async def submit(self, generations: Sequence[Generation]) -> None:
        self._service.submit(generations)

    async def cancel(self, sequences: Sequence[int]) -> None:
        self._service.cancel(sequences)

    async def pull(self, after: int, timeout_s: float) -> list[SequenceEvent]:
        return await asyncio.to_thread(self._service.pull, after, min(timeout_s, _PULL_S))

    async def status(self) -> ServingStatus:
        alive = frozenset(self._workers)
        self._status.observe(alive, frozenset(), {worker: self._sign(worker) for worker in alive})
        return self._status.read()

    async def set_standby(self, *, is_on: bool) -> None:
        del is_on

    async def offer(self, topology: Topology) -> None:
        self._names |= {machine.id: machine.name for machine in topology.contributors}
        if self._epoch == 0 and topology.contributors:
            workers = tuple(sorted(self._names, key=self._names.__getitem__))
            await asyncio.to_thread(self._first, workers)

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        with self._news:
            self._ended = True
            self._news.notify_all()

    # -- its thread ------------------------------------------------------------------------------------------------

    def _first(self, workers: tuple[str, ...]) -> None:
        with self._news:
            self._form(workers)

    def _form(self, workers: tuple[str, ...]) -> None:
        self._epoch += 1
        self._workers = workers
        cuts = [round(LAYERS * index / len(workers)) for index in range(len(workers) + 1)]
        name = self._assignment.spec.name
        folder, window = self._assignment.folder, self._assignment.window_tokens
        cpu = torch.device("cpu")
        self._row = [
            ServingStage(
                self._config, Shard(name, start, stop, LAYERS), cpu, window_tokens=window, tokenizer=folder
            )
            for start, stop in pairwise(cuts)
        ]
        for stage in self._row:
            stage.load(folder)
        self._fed_back.clear()
        limits = SchedulerLimits(
            window_tokens=window, kv_tokens=4 * window, max_sequences=4, step_tokens=256, stages=1,
            max_queued=64, run_ahead=0,
        )  # fmt: skip
        self._service.reform(self._epoch, limits)
        placement = Placement(self._prediction(cuts), 4, {})
        self._status.formed(self._epoch, placement)
        self._status.set_state(DeploymentState.ready, placement.sentence)
        self._news.notify_all()

    def _prediction(self, cuts: list[int]) -> ServingPrediction:
        stages = tuple(
            StagePlan(
                start=start,
                stop=stop,
                parameters=12_000 * (stop - start),
                members=(
                    MemberPlan(
                        contributor_id=worker, name=self._names[worker], microbatches=(0,),
                        memory_bytes=1 << 20, reason="its share by measured speed", busy_fraction=0.6,
                    ),
                ),
            )
            for worker, (start, stop) in zip(self._workers, pairwise(cuts), strict=True)
        )  # fmt: skip
        plan = Plan(
            epoch=self._epoch, strategy="serving", num_layers=LAYERS, parameters=12_000 * LAYERS, stages=stages,
            microbatches=1,
        )  # fmt: skip
        first = self._names[self._workers[0]]
        return ServingPrediction(
            objective="latency", plan=plan, first_token_s=0.01, next_token_s=0.004, request_s=0.5,
            tokens_per_s=250.0, lower_bound_s=0.4, exact=True,
            bottleneck=Bottleneck(kind="compute", where=first, sentence=f"{first} computes most of a token"),
        )  # fmt: skip

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._ended and not (steps := self._next_steps()):
                    self._news.wait()
                if self._ended:
                    return
                # Held during a step, so that a machine is lost between two steps.
                for step in steps:
                    begun_s = time.monotonic()
                    self._service.completed(self._compute(step))
                    total, _ = self._computed_s[-1]
                    self._computed_s.append((total + time.monotonic() - begun_s, time.monotonic()))

    def _next_steps(self) -> list[EngineStep]:
        if not self._row or self.steps_left <= 0:
            return []
        steps = self._service.next_steps()
        self.steps_left -= len(steps)
        return steps

    def _compute(self, step: EngineStep) -> StepResult:
        passed: torch.Tensor | tuple[SampledToken, ...] = torch.tensor(
            step.input_ids(self._fed_back), dtype=torch.int64
        )
        for stage in self._row:
            assert isinstance(passed, torch.Tensor)
            passed = stage.compute(step, passed)
        assert isinstance(passed, tuple)
        for closed in step.closes:
            self._fed_back.pop(closed, None)
        self._fed_back |= {one.sequence: one.token for one in passed if isinstance(one, SampledToken)}
        return StepResult(step.id, step.epoch, passed)

    def _sign(self, worker: str) -> Heartbeat:
        computed_s, _ = self._computed_s[-1]
        return Heartbeat(
            worker=worker, epoch=self._epoch, process_id=os.getpid(), is_computing=False, computed_s=computed_s,
            at_s=time.monotonic(), resident_bytes=300 << 20, cache_bytes=12 << 20,
        )  # fmt: skip


def make_model(folder: Path, *, with_template: bool = True) -> Path:
    """Write a small Llama; without a chat template it only continues text."""
    from tests.api.speaking import make_llama

    make_llama(folder, window=WINDOW, num_hidden_layers=LAYERS)
    if not with_template:
        (folder / "chat_template.jinja").unlink()
    return folder
