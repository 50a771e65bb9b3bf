"""Reads the facts about models' folders in the background, and keeps them until a folder changes."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Final, TypeAlias

from share_compute.errors import ShareComputeError, Unavailable, UserError
from share_compute.files.folder_facts import FolderFacts
from share_compute_api.workers.isolated.messages import ReadModelFacts
from share_compute_api.workers.isolated.remembered import Asks

_MOST_KEPT: Final = 2000
_MOST_ENTRIES: Final = 2000
"""Maximum number of a folder's entries that its version covers."""
Found: TypeAlias = FolderFacts | ShareComputeError | None
"""Facts about a folder, or the reason why it cannot be served; None while the folder is being read."""
_Version: TypeAlias = tuple[tuple[str, int, int], ...]


class FactsReader:
    """Reads folders one after the other, in an isolated process; thread-safe. Call `close` at the end.

    Args:
        processes: isolated processes, which read the files.
    """

    def __init__(self, processes: Asks) -> None:
        self._processes = processes
        # One thread: models that take long leave the other isolated processes to tokenizers and chat templates.
        self._thread = ThreadPoolExecutor(1, "catalogue")
        self._lock = Lock()
        self._known: OrderedDict[Path, tuple[_Version, Future[FolderFacts]]] = OrderedDict()

    def read(self, folders: Mapping[Path, Callable[[], None]], wait_s: float) -> dict[Path, Found]:
        """Return the facts about folders; after ``wait_s`` seconds, None for folders that are not read yet.

        Args:
            folders: each folder, with a function that raises UserError if the folder must not be read.
            wait_s: maximum time to wait, in seconds.
        """
        asked = {folder: self._asked(folder, check) for folder, check in folders.items()}
        wait([one for one in asked.values() if isinstance(one, Future)], wait_s)
        return {folder: self._result(folder, one) for folder, one in asked.items()}

    def close(self) -> None:
        """Stop reading folders."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _asked(self, folder: Path, check: Callable[[], None]) -> Future[FolderFacts] | UserError:
        try:
            version = _version(folder)
        except OSError as failure:
            return UserError(f"the folder cannot be read: {failure.strerror}", hint="fix its rights")
        with self._lock:
            known = self._known.get(folder)
            if known is None or known[0] != version:
                known = version, self._thread.submit(self._read, folder, check)
                self._known[folder] = known
            self._known.move_to_end(folder)
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return known[1]

    def _read(self, folder: Path, check: Callable[[], None]) -> FolderFacts:
        check()
        return self._processes.ask(ReadModelFacts(folder=folder))

    def _result(self, folder: Path, asked: Future[FolderFacts] | UserError) -> Found:
        if isinstance(asked, UserError):
            return asked
        if not asked.done():
            return None
        failure = asked.exception()
        if failure is None:
            return asked.result()
        if isinstance(failure, Unavailable) or not isinstance(failure, ShareComputeError):
            # The folder is not the cause: the next call reads it again.
            with self._lock:
                self._known.pop(folder, None)
            return None
        return failure


def _version(folder: Path) -> _Version:
    """Return the names, sizes and modification times of a folder's entries.

    Links are not followed: the folder has not been checked, and its links may lead to files that must not be touched.
    """
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in islice(entries, _MOST_ENTRIES)]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))
