"""The tokenizers that a process has loaded. The parent reckons with the same class, so both know without a message."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Generic, TypeVar

MOST_KEPT = 8
Thing = TypeVar("Thing")


class Kept(Generic[Thing]):
    """Things by folder and version; the ones that were used last."""

    def __init__(self) -> None:
        self._things: OrderedDict[Path, tuple[int, Thing]] = OrderedDict()

    def others(self, folder: Path | None) -> bool:
        """Return whether anything of another folder is kept."""
        return any(kept != folder for kept in self._things)

    def has(self, folder: Path, version: int) -> bool:
        """Return whether something of this version is kept."""
        found = self._things.get(folder)
        return found is not None and found[0] == version

    def get(self, folder: Path, version: int) -> Thing | None:
        """Return what is kept, if it is of this version."""
        if not self.has(folder, version):
            return None
        self._things.move_to_end(folder)
        return self._things[folder][1]

    def put(self, folder: Path, version: int, thing: Thing) -> None:
        """Keep something in place of an earlier version; the one that was used longest ago goes."""
        self._things[folder] = (version, thing)
        self._things.move_to_end(folder)
        if len(self._things) > MOST_KEPT:
            self._things.popitem(last=False)
