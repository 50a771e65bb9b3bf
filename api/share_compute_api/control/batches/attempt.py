"""One attempt at a batch: sends all rows without a saved answer, saves the answers, and writes the output file."""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from share_compute.batches.inputs import InputRow, Inputs
from share_compute.batches.output import Format, write_output
from share_compute.batches.parts import Parts
from share_compute.errors import (
    Busy,
    Conflict,
    ContributorLost,
    ShareComputeError,
    Unavailable,
    UserError,
)
from share_compute.lifecycle.attempt_events import ArtifactSaved, AttemptEnded, AttemptEvent, RowsDone
from share_compute.store import DeploymentRecord, JobRecord, Store
from share_compute_api.control.batches.pace import Pace
from share_compute_api.control.patience import Patience, patiently
from share_compute_api.openai.batch_rows import RowAnswer, ask
from share_compute_api.openai.engine import Engines, ServingEngine

if TYPE_CHECKING:
    from share_compute.specification import BatchJob

ARTIFACT = "output"
_POLL_S = 1.0
"""Seconds between two polls for a cancellation request, and between two progress reports."""
PAUSE_S = 1.0
"""Pause before a row that was refused is sent again, in seconds, unless the error names another one."""
_LONGEST_PAUSE_S = 10.0
_MOST_MISTAKES = 3
"""Number of unexpected engine errors after which a row is not sent again. The last error becomes the row's answer."""
_ROWS_AHEAD = 2
"""Default number of rows in flight, as a multiple of the number of sequences that all replicas together can generate
at the same time. A value above 1 keeps the deployment's queue filled."""
_log = logging.getLogger(__name__)


class DeploymentGone(Exception):
    """Raised when the batch's deployment was taken down, has failed, or was replaced."""


@dataclass(slots=True)
class _Part:
    """A group of consecutive rows whose answers are saved together."""

    number: int
    answers: list[RowAnswer | None]
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.answers)


class BatchAttempt:
    """Runs one attempt at a batch; records its progress and events in the store.

    Args:
        store: the store of jobs.
        engines: the engines of the served models.
        job: record of the batch; its ``attempt`` is the number of this attempt.
        spec: specification of the batch.
        deployment: the deployment that answers the rows.
        folder: the job's own folder.
    """

    def __init__(
        self,
        store: Store,
        engines: Engines,
        job: JobRecord,
        spec: BatchJob,
        deployment: DeploymentRecord,
        folder: Path,
    ) -> None:
        self._store = store
        self._engines = engines
        self._job = job
        self._spec = spec
        self._deployment = deployment
        self._folder = folder
        self._inputs = Inputs(spec.data.files, spec.data.column)
        self._patience = Patience()
        self._engine: ServingEngine | None = None
        self._pace = Pace(0.0)
        self._recorded: RowsDone | None = None

    async def run(self) -> None:
        """Run the attempt, and record its outcome in the store.

        Raises:
            DeploymentGone: the deployment was taken down, has failed, or was replaced. The attempt has stopped, and its
                end is not recorded.
            Conflict: the job has a newer attempt or is not active.
            Unavailable: the store does not answer.
        """
        work, cancel = asyncio.create_task(self._make()), asyncio.create_task(self._cancelled())
        try:
            await asyncio.wait([work, cancel], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                cancel.result()
                await _ended(work)
                ended = AttemptEnded(outcome="cancelled", reason=f"cancelled; {self._kept()}")
            else:
                ended = work.result()
        finally:
            await _ended(work, cancel)
        await self._record(ended)
        if ended.outcome == "succeeded":
            await asyncio.to_thread(shutil.rmtree, self._parts_folder, ignore_errors=True)

    def _kept(self) -> str:
        done = self._recorded.done if self._recorded is not None else 0
        return f"the {done} rows that are done are kept: share-compute resume {self._job.id}"

    @property
    def _parts_folder(self) -> Path:
        return self._folder / "parts"

    async def _cancelled(self) -> None:
        """Wait until the user has requested cancellation of the job."""
        read = partial(self._store.jobs.get, self._job.id)
        while (await patiently(self._patience, read)).cancel_requested_at is None:  # noqa: ASYNC110 - polls a row
            await asyncio.sleep(_POLL_S)

    async def _record(self, *events: AttemptEvent) -> None:
        record = partial(self._store.progress.record, self._job.id, self._job.attempt, list(events))
        await patiently(self._patience, record)

    # -- the work ----------------------------------------------------------------------------------------------------

    async def _make(self) -> AttemptEnded:
        try:
            return await self._made()
        except Exception as failures:
            failure = _first(failures)
            if isinstance(failure, ShareComputeError):
                return _failed(failure)
            if isinstance(failure, OSError):
                problem = f"the answers cannot be written: {failure.strerror or failure}"
                hint = f"free space, then share-compute resume {self._job.id}"
                return _failed(Unavailable(problem, hint=hint))
            raise failure from failures

    async def _made(self) -> AttemptEnded:
        survey = await asyncio.to_thread(self._inputs.survey)
        model = self._deployment.spec.model.model_dump(mode="json") | {"dtype": self._deployment.spec.dtype}
        parts = await asyncio.to_thread(Parts, self._parts_folder, self._spec.kind, survey, model)
        self._pace = Pace(asyncio.get_running_loop().time())
        await self._record_progress(parts)
        async with asyncio.TaskGroup() as group:
            recording = group.create_task(self._record_progress_periodically(parts))
            await self._answer_all(parts)
            recording.cancel()
        await self._record_progress(parts)
        if await asyncio.to_thread(self._inputs.survey) != survey:
            raise Conflict("the files changed while their rows were answered", hint="submit a new job")
        format_: Format = self._spec.output.format or ("parquet" if self._inputs.is_parquet else "jsonl")
        target = self._folder / "artifacts" / f"{ARTIFACT}.{format_}"
        size_bytes = await asyncio.to_thread(write_output, self._inputs, parts, target, format_)
        await self._record(ArtifactSaved(name=ARTIFACT, path=target, size_bytes=size_bytes))
        return AttemptEnded(outcome="succeeded", reason=_summary(parts))

    async def _answer_all(self, parts: Parts) -> None:
        most = self._spec.concurrency or self._default_concurrency()
        slots = asyncio.Semaphore(most)
        waiting = self._inputs.parts(parts.size, frozenset(parts.done))
        async with asyncio.TaskGroup() as group:
            while (found := await asyncio.to_thread(next, waiting, None)) is not None:
                number, rows = found
                part = _Part(number, [None] * len(rows))
                for place, row in enumerate(rows):
                    await slots.acquire()
                    group.create_task(self._put(slots, parts, part, place, row))

    def _default_concurrency(self) -> int:
        spec = self._deployment.spec
        return _ROWS_AHEAD * spec.max_concurrent * spec.replicas.max

    async def _put(
        self, slots: asyncio.Semaphore, parts: Parts, part: _Part, place: int, row: InputRow
    ) -> None:
        """Answer one row and store the answer at index ``place`` of ``part``; save the part when it is complete."""
        try:
            answer = part.answers[place] = await self._answer(row)
        finally:
            slots.release()
        self._pace.see(asyncio.get_running_loop().time(), answer.tokens)
        part.missing -= 1
        if not part.missing:
            columns = [one.columns for one in part.answers if one is not None]
            await asyncio.to_thread(parts.keep, part.number, columns)

    async def _answer(self, row: InputRow) -> RowAnswer:
        """Send a row to the engine, retry after each failure, and return the answer.

        The answer is an error if the row is invalid, if the engine refuses the row, or after `_MOST_MISTAKES`
        unexpected errors of the engine.
        """
        mistakes = 0
        while row.problem is None:
            engine = await self._found()
            tokenizer = await self._engines.tokenizer(engine)
            try:
                return await ask(self._spec, row, engine, tokenizer, self._job.id)
            except UserError as refusal:
                return RowAnswer({"error": refusal.message})
            except Busy as busy:
                await asyncio.sleep(min(busy.details.get("retry_after_s", PAUSE_S), _LONGEST_PAUSE_S))
            except (Unavailable, ContributorLost) as lost:
                _log.info(
                    "batch %s, row %d is sent to the model again: %s", self._job.id, row.number, lost.message
                )
                await asyncio.sleep(PAUSE_S)
            except ShareComputeError as failure:
                mistakes += 1
                if mistakes >= _MOST_MISTAKES:
                    return RowAnswer({"error": failure.message})
                await asyncio.sleep(PAUSE_S)
        return RowAnswer({"error": row.problem})

    async def _found(self) -> ServingEngine:
        """Return the deployment's engine; wait until there is one.

        If the engine is missing or was replaced, check that the batch's deployment still exists.

        Raises:
            DeploymentGone: the deployment was taken down, has failed, or was replaced.
        """
        name = self._deployment.name
        while (engine := self._engines.find(name)) is None or engine is not self._engine:
            record = await patiently(self._patience, partial(self._store.deployments.by_name, name))
            if record is None or record.id != self._deployment.id:
                raise DeploymentGone
            if engine is not None:
                self._engine = engine
                break
            await asyncio.sleep(PAUSE_S)
        return engine

    # -- progress ----------------------------------------------------------------------------------------------------

    async def _record_progress_periodically(self, parts: Parts) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            await self._record_progress(parts)

    async def _record_progress(self, parts: Parts) -> None:
        """Record the number of saved answers, if the number changed since the last report."""
        if self._recorded is not None and self._recorded.done == parts.rows_done:
            return
        rates = self._pace.rates(asyncio.get_running_loop().time())
        rows_per_s, tokens_per_s = rates or (None, None)
        progress = RowsDone(
            done=parts.rows_done,
            total=parts.total,
            failed=parts.failed,
            rows_per_s=rows_per_s,
            tokens_per_s=tokens_per_s,
        )
        await self._record(progress)
        self._recorded = progress


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _first(failure: Exception) -> Exception:
    """Return the first exception in a nested exception group; return any other exception unchanged."""
    while isinstance(failure, ExceptionGroup):
        failure = failure.exceptions[0]
    return failure


def _failed(failure: ShareComputeError) -> AttemptEnded:
    return AttemptEnded(
        outcome="failed", reason=failure.message, error={"code": failure.code, **failure.facts()}
    )


def _summary(parts: Parts) -> str:
    answered = f"answered {parts.total - parts.failed} of {parts.total} rows"
    if not parts.failed:
        return answered
    return (
        f"{answered}; {parts.failed} {'has' if parts.failed == 1 else 'have'} an error in place of an answer"
    )
