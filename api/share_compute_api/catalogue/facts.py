"""Reads the facts about models' folders in the background, and keeps them until a folder changes."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Final, TypeAlias

from share_compute.errors import ShareComputeError, Unavailable, UserError
from share_compute.files.folder_facts import FolderFacts
from share_compute_api.workers.isolated.messages import ReadModelFacts
from share_compute_api.workers.isolated.remembered import Asks

_MOST_KEPT: Final = 2000
_MOST_WAITING: Final = 200
"""Maximum number of a call's folders that wait to be read."""
_RETRY_S: Final = 30.0
"""Time after which a folder is read again if the failure may be due to the server's load, in seconds."""
_LIMITS: Final = {"too_much_time": "time", "too_much_memory": "memory"}
"""Codes of the errors of isolated processes about limits, and what is limited."""
_MOST_ENTRIES: Final = 2000
"""Maximum number of a folder's entries that its version covers."""
Found: TypeAlias = FolderFacts | ShareComputeError | None
"""Facts about a folder, or the reason why it cannot be served; None while the folder is being read."""
_Version: TypeAlias = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Reading:
    """One folder that is read, or was."""

    version: _Version
    facts: Future[FolderFacts]
    asked_s: float
    """When it was asked for, in seconds of the clock."""


class FactsReader:
    """Reads the facts about folders one after the other, in an isolated process; thread-safe. Call `close` at the end.

    Args:
        processes: isolated processes, which read the files.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, processes: Asks, clock: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._clock = clock
        # One thread: slow models must leave the other isolated processes to tokenizers and chat templates.
        self._thread = ThreadPoolExecutor(1, "catalogue")
        self._lock = Lock()
        self._known: OrderedDict[Path, _Reading] = OrderedDict()

    def read(self, folders: Mapping[Path, Callable[[], None]], wait_s: float) -> dict[Path, Found]:
        """Return the facts about folders; after ``wait_s`` seconds, None for folders that are not read yet.

        At most 200 folders of a call are queued at a time, so that a caller with many folders does not delay other
        callers.

        Args:
            folders: each folder, with a function that raises UserError if the folder must not be read.
            wait_s: maximum time to wait, in seconds.
        """
        asked: dict[Path, Future[FolderFacts] | UserError | None] = {}
        waiting = 0
        for folder, check in folders.items():
            asked[folder] = one = self._asked(folder, check if waiting < _MOST_WAITING else None)
            waiting += isinstance(one, Future) and not one.done()
        wait([one for one in asked.values() if isinstance(one, Future)], wait_s)
        return {folder: _result(one) for folder, one in asked.items()}

    def close(self) -> None:
        """Stop reading folders."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _asked(
        self, folder: Path, check: Callable[[], None] | None
    ) -> Future[FolderFacts] | UserError | None:
        """Return the facts about a folder, or the reason why they are missing.

        Args:
            folder: the folder.
            check: raises UserError if the folder must not be read; None to read no folder now.
        """
        try:
            version = _version(folder)
        except OSError as failure:
            return UserError(f"the folder cannot be read: {failure.strerror}", hint="fix its rights")
        with self._lock:
            known = self._known.get(folder)
            if known is None or self._is_stale(known, version):
                if known is not None:
                    known.facts.cancel()
                if check is None:
                    self._known.pop(folder, None)
                    return None
                known = _Reading(version, self._thread.submit(self._read, folder, check), self._clock())
                self._known[folder] = known
            self._known.move_to_end(folder)
            if len(self._known) > _MOST_KEPT:
                _, evicted = self._known.popitem(last=False)
                evicted.facts.cancel()
        return known.facts

    def _is_stale(self, known: _Reading, version: _Version) -> bool:
        """Return whether a folder must be read again: it changed, or the last failure had another cause."""
        if known.facts.cancelled() or known.version != version:
            return True
        if not known.facts.done() or (failure := known.facts.exception()) is None:
            return False
        if _limited(failure) is not None:
            return self._clock() - known.asked_s >= _RETRY_S
        return isinstance(failure, Unavailable) or not isinstance(failure, ShareComputeError)

    def _read(self, folder: Path, check: Callable[[], None]) -> FolderFacts:
        check()
        return self._processes.ask(ReadModelFacts(folder=folder))


def _limited(failure: BaseException) -> str | None:
    """Return the limit that a request exceeded, perhaps because of the server's load; None for other failures."""
    code = failure.details.get("code") if isinstance(failure, ShareComputeError) else None
    return _LIMITS.get(str(code))


def _result(asked: Future[FolderFacts] | UserError | None) -> Found:
    if not isinstance(asked, Future):
        return asked
    if not asked.done() or asked.cancelled():
        return None
    failure = asked.exception()
    if failure is None:
        return asked.result()
    if not isinstance(failure, ShareComputeError) or isinstance(failure, Unavailable):
        return None
    if (limited := _limited(failure)) is not None:
        return UserError(
            f"reading the folder took too much {limited}",
            hint=f"it is read again after {_RETRY_S:g} s; if it fails again, use the model's published files",
        )
    return failure


def _version(folder: Path) -> _Version:
    """Return the names, sizes and modification times of a folder's entries.

    Links are not followed: the folder has not been checked, and its links may lead to files that must not be accessed.
    """
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in islice(entries, _MOST_ENTRIES)]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))
