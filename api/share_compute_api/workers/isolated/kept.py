"""LRU cache of the tokenizers in an isolated process.

The parent process uses the same class to track which tokenizers the isolated process has loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Generic, TypeVar

MOST_KEPT = 8
Thing = TypeVar("Thing")


class Kept(Generic[Thing]):
    """LRU cache with one entry per folder; each entry has a version."""

    def __init__(self) -> None:
        self._things: OrderedDict[Path, tuple[int, Thing]] = OrderedDict()

    def has(self, folder: Path, version: int) -> bool:
        """Return whether the folder has an entry with this version."""
        found = self._things.get(folder)
        return found is not None and found[0] == version

    def get(self, folder: Path, version: int) -> Thing | None:
        """Return the folder's entry if it has this version; else None."""
        if not self.has(folder, version):
            return None
        self._things.move_to_end(folder)
        return self._things[folder][1]

    def forget(self, folder: Path) -> None:
        """Remove the folder's entry, if there is one."""
        self._things.pop(folder, None)

    def put(self, folder: Path, version: int, thing: Thing) -> None:
        """Store an entry and remove the folder's earlier entry; if the cache is full, evict the least recently used."""
        self._things[folder] = (version, thing)
        self._things.move_to_end(folder)
        if len(self._things) > MOST_KEPT:
            self._things.popitem(last=False)
