"""Writes the reports that training jobs request with ``report``, after the jobs have ended."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from share_compute.errors import NotFound, ShareComputeError, Unavailable
from share_compute.lifecycle.attempt_events import ArtifactSaved, Note
from share_compute.lifecycle.folders import REPORTS
from share_compute.specification.job import Report
from share_compute.specification.paths import with_file_names
from share_compute.store import JobRecord, Store
from share_compute_api.connection.notifier import Notifier
from share_compute_api.control.polling import poll_forever
from share_compute_api.workers.module_process import run_module
from share_compute_api.workers.reporting import ReportRequest

_WINDOW = timedelta(days=7)
"""Time after the end of a job in which its reports are written, for example after the server was down."""
_LIMIT_S = 900.0
"""Longest time for one report, in seconds."""
_AT_ONCE = 2
_NOTHING_IS_SENT = {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"}
_log = logging.getLogger(__name__)


class ReportSupervisor:
    """Writes each report of an ended job once, in a separate process, and adds it to the job's results.

    Two reports are written at a time. If a report cannot be written, the job's log says so, and the next start of the
    server retries it.

    Args:
        store: the store of jobs.
        data_folder: the server's data folder.
        rows: returns the rows of a job's series, given its id.
        notifier: signals changes in the store.
    """

    def __init__(
        self,
        store: Store,
        data_folder: Path,
        rows: Callable[[str], Iterator[dict[str, Any]]],
        notifier: Notifier,
    ) -> None:
        self._store = store
        self._folder = data_folder / REPORTS
        self._rows = rows
        self._notifier = notifier
        self._failed: set[tuple[str, int, Report]] = set()
        """Reports that could not be written: job id, attempt and format."""
        self._writing: dict[tuple[str, Report], asyncio.Task[None]] = {}
        """Reports that are being written, by job id and format."""

    async def run(self) -> None:
        """Write reports until cancelled."""
        try:
            await poll_forever(self._start_due, "reports of jobs", self._notifier)
        finally:
            for task in self._writing.values():
                task.cancel()
            await asyncio.gather(*self._writing.values(), return_exceptions=True)

    async def _start_due(self) -> None:
        """Start writing reports that are due, as long as fewer than `_AT_ONCE` are being written."""
        since = self._store.clock() - _WINDOW
        for key, task in list(self._writing.items()):
            if task.done():
                del self._writing[key]
                task.result()
        for job, reports in await asyncio.to_thread(self._store.progress.unreported, since):
            for report in reports:
                is_new = (job.id, job.attempt, report) not in self._failed
                if is_new and (job.id, report) not in self._writing and len(self._writing) < _AT_ONCE:
                    self._writing[job.id, report] = asyncio.create_task(self._write(job, report))

    async def _write(self, job: JobRecord, report: Report) -> None:
        try:
            saved = await self._written(job, report)
            await asyncio.to_thread(self._store.progress.add_report, job, saved)
        except NotFound:
            await asyncio.to_thread(
                shutil.rmtree, self._folder / job.id, ignore_errors=True
            )  # it was deleted
        except (ShareComputeError, OSError) as failure:
            self._failed.add((job.id, job.attempt, report))
            message = f"the report for {report} could not be written: {failure}"
            _log.warning("job %s: %s", job.id, message)
            await asyncio.to_thread(
                self._store.progress.add_note, job.id, Note(level="warning", message=message)
            )

    async def _written(self, job: JobRecord, report: Report) -> ArtifactSaved:
        """Write a report, replacing an earlier one.

        Raises:
            OSError: the files cannot be written.
            Unavailable: the process failed.
        """
        folder, rows = self._folder / job.id / report, self._folder / job.id / f"{report}.jsonl"
        await asyncio.to_thread(self._prepare, job.id, folder, rows)
        spec = with_file_names(job.training)
        request = ReportRequest(
            report=report,
            rows=rows,
            folder=folder,
            job_id=job.id,
            name=job.name,
            began_s=(job.started_at or job.created_at).timestamp(),
            settings=spec.model_dump(mode="json", exclude={"then", "report"}),
        )
        try:
            with TemporaryDirectory(prefix="share-compute-report-") as home:
                async with asyncio.timeout(_LIMIT_S):
                    status, _, complaints = await run_module(
                        "share_compute_api.workers.reporting",
                        request=request.model_dump_json().encode(),
                        environment={"HOME": home, "TMPDIR": home, **_NOTHING_IS_SENT},
                    )
        except TimeoutError as failure:
            raise Unavailable(
                f"it took more than {_LIMIT_S:.0f} s", hint="look into the server's log"
            ) from failure
        finally:
            rows.unlink(missing_ok=True)
        if status != 0:
            last = complaints.rpartition("\n")[2]
            raise Unavailable(
                f"its process ended with status {status}: {last}", hint="look into the server's log"
            )
        return ArtifactSaved(name=report, path=folder, size_bytes=await asyncio.to_thread(_size, folder))

    def _prepare(self, job_id: str, folder: Path, rows: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        with rows.open("w", encoding="utf-8") as file:
            for row in self._rows(job_id):
                file.write(json.dumps(row) + "\n")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
