"""Asks processes of their own for plans: planning counts models with torch, which the control plane is free of."""

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
from share_compute_api.module_process import run_module
from share_compute_api.planning import TimelineRequest
from share_compute_api.schemas import PlanRequest

_AT_ONCE = 2
_MOST_UNDER_WAY = 16
_TIMEOUT_S = 240.0
_MEMORY_BYTES = 4 * 2**30
"""Torch and its libraries take about half a GiB of it."""
_SHOWN_CHARACTERS = 4000
_TIMELINES_KEPT = 32
_ALONE = "plan on your own: share-compute plan --topology FILE"
_log = logging.getLogger(__name__)


class PlanProcesses:
    """Makes plans, a few at a time; others wait for their turn.

    Args:
        at_once: processes that may run at one time.
        most_under_way: plans that may be made or wait for their turn; more are refused.
        timeout_s: longest time that a plan may take, with the wait for its turn.
        memory_bytes: most memory that a process may take (Linux).
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
        """Requests whose plan is being made, or waits for its turn."""
        self._timelines: OrderedDict[str, PlanTimeline] = OrderedDict()

    async def plan(self, request: PlanRequest, gone: Awaitable[object]) -> PlanReport | None:
        """Return the report of a dry run; None when whoever asked for it went away first.

        Args:
            request: with its topology.
            gone: ends when nobody wants the answer any more.

        Raises:
            ShareComputeError: what the planner raised.
            Unavailable: too many wait already, it took too long or too much memory, or its process died.
        """
        report = await self._answer("plan", request.model_dump_json(), gone)
        return None if report is None else PlanReport.model_validate(report)

    async def timeline(
        self, request: TimelineRequest, gone: Callable[[], Awaitable[object]]
    ) -> PlanTimeline | None:
        """Return one step of a plan; None when whoever asked for it went away first.

        What was asked for before is known: pages ask for the same plan again and again.

        Args:
            request: which plan, and what is known of its machines.
            gone: what it returns ends when nobody wants the answer any more.

        Raises:
            ShareComputeError: as `plan`.
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
                mend=f"ask again in a minute, or {_ALONE}",
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
                    mend=f"ask again in a minute, or {_ALONE}",
                ) from None
            raise Unavailable(
                f"no plan was found within {self._timeout_s:g} s",
                mend=f"ask for fewer machines or pools, or {_ALONE}",
            ) from None
        if status != 0:
            _log.error("a plan failed with status %d: %s", status, complaints[-_SHOWN_CHARACTERS:])
            if status < 0:
                raise Unavailable(
                    f"the planner was ended by signal {-status}; it may have run out of memory",
                    mend=f"try again, or {_ALONE}",
                )
            raise ShareComputeError(
                "the planner made a mistake", mend="look into the server's log, and report it"
            )
        document = json.loads(answer)
        if (problem := document.get("problem")) is not None:
            raise error_of(problem["code"], problem["detail"], problem)
        return document["report"]


async def _run(wanted: str, request: bytes, memory_bytes: int) -> tuple[int, bytes, str]:
    """Return the planner's exit status, its answer and what it complained about."""
    # One thread each is enough for tables, and their stacks would count as memory on machines with many processors.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    module = "share_compute_api.planning"
    return await run_module(module, wanted, str(memory_bytes), request=request, environment=threads)
