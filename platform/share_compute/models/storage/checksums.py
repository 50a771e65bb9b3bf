"""Checksums of a folder's files, stored in the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

CHECKSUMS = "checksums.json"
"""Name of the file that holds the algorithm, and the size and checksum of every other file in the folder."""
ALGORITHM = "xxh3_128"
_BLOCK_BYTES = 2**20


class Checksums:
    """Incremental checksums of files that grow."""

    def __init__(self) -> None:
        self._hashes: dict[str, xxhash.xxh3_128] = {}
        self._sizes: dict[str, int] = {}

    def add(self, name: str, content: bytes) -> None:
        """Update the checksum of a file for content that is appended to it."""
        self._hashes.setdefault(name, xxhash.xxh3_128()).update(content)
        self._sizes[name] = self._sizes.get(name, 0) + len(content)

    def add_file(self, file: Path, name: str) -> None:
        """Add the checksum of a whole file, reading it once.

        Args:
            file: path of the file.
            name: path of the file inside the folder.
        """
        self.add(name, b"")
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                self.add(name, block)

    def rename(self, name: str, final: str) -> None:
        """Record that a file was renamed."""
        self._hashes[final], self._sizes[final] = self._hashes.pop(name), self._sizes.pop(name)

    def remove(self, name: str) -> None:
        """Record that a file was removed, if it existed."""
        self._hashes.pop(name, None)
        self._sizes.pop(name, None)

    def document(self) -> dict[str, Any]:
        """Return the content of the file `CHECKSUMS`."""
        files = {
            name: {"size_bytes": self._sizes[name], "checksum": self._hashes[name].hexdigest()}
            for name in sorted(self._hashes)
        }
        return {"algorithm": ALGORITHM, "files": files}


def damage(folder: Path, is_meant: Callable[[str], bool] = lambda _name: True) -> str | None:
    """Return a message about the first damaged or missing file of a folder; None if all checked files are intact.

    Each checked file is read whole. A folder without the file `CHECKSUMS` counts as undamaged.

    Args:
        folder: a finished folder.
        is_meant: function that returns whether to check the file of this name; default: all files.
    """
    file = folder / CHECKSUMS
    if not file.exists():
        return None
    try:
        document = json.loads(file.read_bytes())
        algorithm, files = document["algorithm"], document["files"]
        expected = {
            name: (said["size_bytes"], said["checksum"]) for name, said in files.items() if is_meant(name)
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as failure:
        return f"{file} is damaged: {failure}"
    if algorithm != ALGORITHM:
        return f"{file} was made with {algorithm}, which this version does not know"
    return _first_damage(folder, expected)


def _first_damage(folder: Path, expected: Mapping[str, tuple[int, str]]) -> str | None:
    for name, (size_bytes, checksum) in expected.items():
        file = folder / name
        try:
            if file.stat().st_size != size_bytes:
                return f"{file} has {file.stat().st_size} bytes, not {size_bytes}"
            if _checksum(file) != checksum:
                return f"{file} is damaged: its checksum is not the one that it was saved with"
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as failure:
            return f"{file} cannot be read: {failure.strerror or failure}"
    return None


def _checksum(file: Path) -> str:
    hashed = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            hashed.update(block)
    return hashed.hexdigest()
