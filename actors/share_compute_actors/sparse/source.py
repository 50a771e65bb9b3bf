"""Prepared rows on the server, which workers on other machines fetch in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from share_compute.sparse.blocks import RawRows
from share_compute.sparse.readers.prepared import rows_of

PIECE_BYTES = 4 << 20
"""Bytes of a file in one call, so that Ray sends them inline."""
VALIDATION = "validation"
"""Folder in that of the prepared files, for the rows on which the model is measured."""


class PreparedFiles:
    """Files that workers may fetch.

    Args:
        folder: folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def piece(self, file: str, offset: int) -> bytes:
        """Return at most `PIECE_BYTES` of a file; nothing if it is not one of the prepared files."""
        path = Path(file)
        if path.parent not in (self._folder, self._folder / VALIDATION) or not path.is_file():
            return b""
        with path.open("rb") as opened:
            opened.seek(offset)
            return opened.read(PIECE_BYTES)


def fetched(source: Any, file: str) -> RawRows:
    """Return the rows of a prepared file.

    Raises:
        VerificationFailed: the source has no such file.

    Args:
        source: actor with a method ``piece``; see `PreparedFiles`.
        file: path of the file on the server.
    """
    parts, offset = list[bytes](), 0
    while not parts or len(parts[-1]) == PIECE_BYTES:
        parts.append(ray.get(source.piece.remote(file, offset)))
        offset += len(parts[-1])
    return rows_of(b"".join(parts))
