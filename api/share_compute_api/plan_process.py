"""Asks processes of their own for plans: planning counts models with torch, which the control plane is free of."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable
from contextlib import suppress

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.planning.report import PlanReport
from share_compute_actors.processes import tied
from share_compute_api.schemas import PlanRequest
from share_compute_api.transport import error_of

_AT_ONCE = 2
_TIMEOUT_S = 240.0
_SHOWN_CHARACTERS = 4000
_log = logging.getLogger(__name__)


class PlanProcesses:
    """Makes plans, a few at a time; others wait for their turn.

    Args:
        at_once: processes that may run at one time.
        timeout_s: longest time that a plan may take, without the wait for its turn.
    """

    def __init__(self, at_once: int = _AT_ONCE, timeout_s: float = _TIMEOUT_S) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._timeout_s = timeout_s
        self.under_way = 0
        """Requests whose plan is being made, or waits for its turn."""

    async def plan(self, request: PlanRequest, gone: Awaitable[object]) -> PlanReport | None:
        """Return the report of a dry run; None when whoever asked for it went away first.

        Args:
            request: with its topology.
            gone: ends when nobody wants the answer any more.

        Raises:
            ShareComputeError: what the planner raised.
            Unavailable: it took too long, or its process died.
        """
        self.under_way += 1
        work = asyncio.ensure_future(self._in_turn(request))
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

    async def _in_turn(self, request: PlanRequest) -> PlanReport:
        async with self._turns:
            try:
                async with asyncio.timeout(self._timeout_s):
                    status, answer, complaints = await _run(request.model_dump_json().encode())
            except TimeoutError:
                raise Unavailable(
                    f"no plan was found within {self._timeout_s:g} s",
                    mend="ask for fewer machines or pools, or plan on your own: share-compute plan --topology FILE",
                ) from None
        if status != 0:
            _log.error("a plan failed with status %d: %s", status, complaints[-_SHOWN_CHARACTERS:])
            if status < 0:
                raise Unavailable(
                    f"the planner was ended by signal {-status}; it may have run out of memory",
                    mend="try again, or plan on your own: share-compute plan --topology FILE",
                )
            raise ShareComputeError(
                "the planner made a mistake", mend="look into the server's log, and report it"
            )
        document = json.loads(answer)
        if (problem := document.get("problem")) is not None:
            raise error_of(problem["code"], problem["detail"], problem)
        return PlanReport.model_validate(document["report"])


async def _run(request: bytes) -> tuple[int, bytes, str]:
    """Return the planner's exit status, its answer and what it complained about."""
    command = tied([sys.executable, "-m", "share_compute_api.planning"])
    # Nothing is looked up in the network: what a job names lies on this machine.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment
    )
    try:
        answer, complaints = await process.communicate(request)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, answer, complaints.decode(errors="replace").strip()
