"""The tokenizers that a process has loaded. The parent tracks them with the same class, without messages."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Generic, TypeVar

MOST_KEPT = 8
Thing = TypeVar("Thing")


class Kept(Generic[Thing]):
    """The most recently used things, by folder and version."""

    def __init__(self) -> None:
        self._things: OrderedDict[Path, tuple[int, Thing]] = OrderedDict()

    def others(self, folder: Path | None) -> bool:
        """Return whether a thing of another folder is kept."""
        return any(kept != folder for kept in self._things)

    def has(self, folder: Path, version: int) -> bool:
        """Return whether a thing of this folder and version is kept."""
        found = self._things.get(folder)
        return found is not None and found[0] == version

    def get(self, folder: Path, version: int) -> Thing | None:
        """Return the thing of this folder and version, if it is kept."""
        if not self.has(folder, version):
            return None
        self._things.move_to_end(folder)
        return self._things[folder][1]

    def put(self, folder: Path, version: int, thing: Thing) -> None:
        """Keep a thing in place of an earlier version; evict the least recently used one."""
        self._things[folder] = (version, thing)
        self._things.move_to_end(folder)
        if len(self._things) > MOST_KEPT:
            self._things.popitem(last=False)
