"""Computes plans in separate processes: profiling a model needs torch, which the control plane must not load."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal

from share_compute.errors import ShareComputeError, Unavailable, error_of
from share_compute.planning.report import PlanReport, PlanTimeline
from share_compute_api.schemas.bodies import PlanRequest
from share_compute_api.workers.module_process import run_module
from share_compute_api.workers.planning import TimelineRequest

_AT_ONCE = 2
_MOST_UNDER_WAY = 16
_TIMEOUT_S = 240.0
_MEMORY_BYTES = 4 * 2**30
"""Memory limit of a planning process, in bytes; torch and its libraries take about 512 MiB of it."""
_SHOWN_CHARACTERS = 4000
_TIMELINES_KEPT = 32
_ALONE = "plan on your own: share-compute plan --topology FILE"
_log = logging.getLogger(__name__)


class PlanProcesses:
    """Computes plans, a few at the same time; further requests wait in a queue.

    Args:
        at_once: maximum number of processes that run at the same time.
        most_under_way: maximum number of plans that are being computed or queued; further requests are rejected.
        timeout_s: time limit for a plan in seconds, including the wait in the queue.
        memory_bytes: memory limit of a process, in bytes.
    """

    def __init__(
        self,
        at_once: int = _AT_ONCE,
        most_under_way: int = _MOST_UNDER_WAY,
        timeout_s: float = _TIMEOUT_S,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._most_under_way = most_under_way
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self.under_way = 0
        """Number of requests whose plan is being computed or queued."""
        self._timelines: OrderedDict[str, PlanTimeline] = OrderedDict()

    async def plan(self, request: PlanRequest, gone: Awaitable[object]) -> PlanReport | None:
        """Plan a job without running it, and return the report; None if ``gone`` completes first.

        Args:
            request: the request; its topology must not be None.
            gone: awaitable that completes when the answer is no longer needed.

        Raises:
            ShareComputeError: the error that the planner raised, or its process failed.
            Unavailable: too many plans are queued, the plan took too much time or memory, or its process died.
        """
        report = await self._answer("plan", request.model_dump_json(), gone)
        return None if report is None else PlanReport.model_validate(report)

    async def timeline(
        self, request: TimelineRequest, gone: Callable[[], Awaitable[object]]
    ) -> PlanTimeline | None:
        """Return the timeline of one step of a plan; None if the awaitable from ``gone`` completes first.

        Answers are cached, because pages of the dashboard request the same plan repeatedly.

        Args:
            request: the plan, and the known timings of its machines.
            gone: returns an awaitable that completes when the answer is no longer needed.

        Raises:
            ShareComputeError: for the same reasons as `plan`.
        """
        text = request.model_dump_json()
        known = self._timelines.get(text)
        if known is None:
            answer = await self._answer("timeline", text, gone())
            if answer is None:
                return None
            known = self._timelines[text] = PlanTimeline.model_validate(answer)
            if len(self._timelines) > _TIMELINES_KEPT:
                self._timelines.popitem(last=False)
        self._timelines.move_to_end(text)
        return known

    async def _answer(self, wanted: Literal["plan", "timeline"], text: str, gone: Awaitable[object]) -> Any:
        self.under_way += 1
        work = asyncio.ensure_future(self._in_turn(wanted, text))
        watch = asyncio.ensure_future(gone)
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else None
        finally:
            self.under_way -= 1
            for task in (work, watch):
                task.cancel()
                with suppress(asyncio.CancelledError, ShareComputeError):
                    await task

    async def _in_turn(self, wanted: str, text: str) -> Any:
        if self.under_way > self._most_under_way:
            raise Unavailable(
                f"{self.under_way - 1} plans are being made or wait for their turn",
                hint=f"ask again in a minute, or {_ALONE}",
            )
        has_begun = False
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                has_begun = True
                status, answer, complaints = await _run(wanted, text.encode(), self._memory_bytes)
        except TimeoutError:
            if not has_begun:
                raise Unavailable(
                    f"the plans of others took all of {self._timeout_s:g} s",
                    hint=f"ask again in a minute, or {_ALONE}",
                ) from None
            raise Unavailable(
                f"no plan was found within {self._timeout_s:g} s",
                hint=f"ask for fewer machines or stages, or {_ALONE}",
            ) from None
        if status != 0:
            _log.error("a plan failed with status %d: %s", status, complaints[-_SHOWN_CHARACTERS:])
            if status < 0:
                raise Unavailable(
                    f"the planner was ended by signal {-status}; it may have run out of memory",
                    hint=f"try again, or {_ALONE}",
                )
            raise ShareComputeError(
                "the planner failed with an internal error", hint="look into the server's log, and report it"
            )
        document = json.loads(answer)
        if (problem := document.get("problem")) is not None:
            raise error_of(problem["code"], problem["detail"], problem)
        return document["report"]


async def _run(wanted: str, request: bytes, memory_bytes: int) -> tuple[int, bytes, str]:
    """Run the planner; return its exit status, its standard output and its standard error."""
    # One thread is enough for the planner's arrays. On machines with many processors, the stacks of more threads would
    # use up the memory limit.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    module = "share_compute_api.workers.planning"
    return await run_module(module, wanted, str(memory_bytes), request=request, environment=threads)
