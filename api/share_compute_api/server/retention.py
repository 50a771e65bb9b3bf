"""Deletes the files of deleted jobs, and deletes records and files whose retention time is over."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, astuple
from pathlib import Path

from share_compute.errors import Conflict, ShareComputeError
from share_compute.files.plain_files import remove_unlinked
from share_compute.lifecycle.folders import BATCHES, REPORTS, TRAINING
from share_compute.settings import Settings
from share_compute.store import Store
from share_compute.store.retention import Keep, Prunable
from share_compute_api.schemas.retention import Pruned, PruneReport

_POLL_S = 5.0
_log = logging.getLogger(__name__)


class Cleaner:
    """Carries out postponed deletions, deletes the files of deleted records, and prunes at regular intervals.

    Args:
        store: the store with the rows.
        data_folder: folder that contains the folders of all jobs; nothing outside the jobs' folders is deleted.
        keep: retention times, in days; None keeps data forever.
        prune_every_s: time between two prunings, in seconds.
    """

    def __init__(self, store: Store, data_folder: Path, keep: Keep, prune_every_s: float) -> None:
        self._prune_every_s = prune_every_s
        self._store = store
        self._data_folder = data_folder
        self._keep = keep

    async def run(self) -> None:
        """Call `delete_due` every 5 s and `prune` every ``prune_every_s`` seconds, until cancelled."""
        loop = asyncio.get_running_loop()
        next_prune_s = loop.time()
        while True:
            try:
                if any(days is not None for days in astuple(self._keep)) and loop.time() >= next_prune_s:
                    next_prune_s = loop.time() + self._prune_every_s
                    report = await asyncio.to_thread(self.prune, dry_run=False)
                    if report.pruned:
                        _log.info("pruned %d things, %d bytes", len(report.pruned), report.size_bytes)
                await asyncio.to_thread(self.delete_due)
            except ShareComputeError as failure:
                _log.warning("deleted files could not be removed: %s", failure.message)
            await asyncio.sleep(_POLL_S)

    def delete_due(self) -> None:
        """Delete jobs whose deletion was postponed until their end, and delete the folders of deleted records."""
        for job_id in self._store.deletions.due():
            try:
                self._store.deletions.job(job_id, self._data_folder)
            except Conflict as used:
                _log.info("%s is not deleted yet: %s", job_id, used.message)
        for folder in self._store.deletions.folders():
            self._remove(folder)

    def prune(self, *, dry_run: bool) -> PruneReport:
        """Delete records and files whose retention time has passed, and report them; with ``dry_run``, only report."""
        retention = self._store.retention
        found = retention.find(self._keep, self._data_folder)
        sizes = {one: _size(one.folder) for one in found}
        gone: Sequence[Prunable] = found if dry_run else retention.prune(self._keep, self._data_folder)
        pruned = tuple(
            Pruned(
                kind=one.kind,
                job_id=one.job_id,
                name=one.name,
                rows=one.rows,
                size_bytes=sizes.get(one, 0),
            )
            for one in gone
        )
        if not dry_run:
            self.delete_due()
        return PruneReport(
            dry_run=dry_run,
            pruned=pruned,
            size_bytes=sum(one.size_bytes for one in pruned),
            keep={f"keep_{name}": days for name, days in asdict(self._keep).items() if days is not None},
        )

    def _remove(self, folder: Path) -> None:
        place = self._without_links(folder)
        if place is None:
            _log.error("%s is not removed: it is not a job's folder", folder)
            self._store.deletions.removed(folder)
            return
        try:
            remove_unlinked(place)
        except FileNotFoundError:
            pass
        except OSError as failure:
            _log.warning("%s cannot be removed yet: %s", folder, failure.strerror)
            return
        self._store.deletions.removed(folder)

    def _without_links(self, folder: Path) -> Path | None:
        """Return ``folder`` with the data folder's links resolved.

        Return None unless ``folder`` is a job's folder or is inside one.
        """
        if ".." in folder.parts:
            return None
        resolved = self._data_folder.resolve()
        inside = [
            folder.relative_to(root) for root in (self._data_folder, resolved) if root in folder.parents
        ]
        is_job = (
            bool(inside) and inside[0].parts[0] in (TRAINING, BATCHES, REPORTS) and len(inside[0].parts) > 1
        )
        return resolved / inside[0] if is_job else None


def cleaner(settings: Settings, store: Store) -> Cleaner:
    """Return a `Cleaner` with the data folder and the retention times of the settings."""
    keep = Keep(
        jobs_days=settings.keep_jobs_days,
        artifacts_days=settings.keep_artifacts_days,
        checkpoints_days=settings.keep_checkpoints_days,
        metrics_days=settings.keep_metrics_days,
        events_days=settings.keep_events_days,
    )
    return Cleaner(store, settings.data_folder, keep, settings.prune_every_s)


def _size(folder: Path | None) -> int:
    """Return the size of all files below a folder, in bytes; files that disappear during the call are not counted."""
    if folder is None:
        return 0
    # os.walk skips folders that disappear during the walk; Path.rglob raises an error for them in Python 3.11.
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).lstat().st_size
    return total
