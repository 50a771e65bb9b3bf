"""Translates errors of the libraries that read data files into reasons for users.

The libraries' own messages name functions and options that users of share-compute do not have.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from share_compute.errors import UserError, is_lack_of_memory

_CELLS = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_KNOWN = (
    (re.compile(r"straddl"), "a row is longer than 4 MiB"),
    (re.compile(r"invalid UTF-?8", re.IGNORECASE), "it is not UTF-8 text"),
    (re.compile(r"empty CSV file", re.IGNORECASE), "it is empty"),
    (re.compile(r"field larger than field limit"), "a name in its header is too long"),
    (re.compile(r"exceeds the limit .* digits", re.IGNORECASE), "a number has too many digits"),
    (re.compile(r"not (yet )?implemented|unsupported", re.IGNORECASE), "it has a type that is not read"),
)
"""Sentences of pyarrow and of the module csv, with the reason to show."""


_MEMORY_HINT = "free memory on the machine that reads it, or let fewer processes run there"


@dataclass(frozen=True, slots=True)
class WrongCells:
    """A row of a .csv file that has another number of cells than the header.

    Args:
        row: number of the row, from 1; the header does not count.
        cells: number of its cells.
        columns: number of cells of the header.
    """

    row: int
    cells: int
    columns: int

    def __str__(self) -> str:
        cells = "1 cell" if self.cells == 1 else f"{self.cells} cells"
        return f"{cells}, and the header has {self.columns}"


def wrong_cells(failure: Exception) -> WrongCells | None:
    """Return the row with too few or too many cells that an error of pyarrow names, or None."""
    found = _CELLS.search(str(failure))
    if found is None:
        return None
    row, columns, cells = map(int, found.groups())
    return WrongCells(row - 1, cells, columns)


def unreadable(file: Path, failure: Exception, hint: str) -> UserError:
    """Return the error for a data file that cannot be read.

    Args:
        file: the file; its suffix names the expected format.
        failure: the error of a library, or of the operating system.
        hint: action for a damaged file; the error has another hint if memory was lacking.
    """
    return UserError(
        f"data file {file} cannot be read as {file.suffix}: {damage_of(file, failure)}",
        hint=_MEMORY_HINT if is_lack_of_memory(failure) else hint,
    )


def damage_of(file: Path, failure: Exception) -> str:
    """Return the reason why a data file cannot be read, as a clause that follows a colon.

    Args:
        file: the file; its suffix names the expected format.
        failure: the error of a library, or of the operating system.
    """
    match failure:
        case _ if is_lack_of_memory(failure):
            reason = "memory was lacking while it was read"
        case UnicodeEncodeError():  # JSON can encode half of a surrogate pair
            reason = "it is not UTF-8 text: it has half of a surrogate pair"
        case UnicodeError():
            reason = "it is not UTF-8 text"
        case OSError(strerror=str(told)):
            reason = told
        case RecursionError():
            reason = "its brackets are nested too deeply"
        case json.JSONDecodeError():
            reason = f"the error is at character {failure.pos + 1}"
        case NotImplementedError():
            reason = "it has a type that is not read"
        case _:
            reason = _translated(file, failure)
    return reason


def _translated(file: Path, failure: Exception) -> str:
    wrong = wrong_cells(failure)
    if wrong is not None:
        return f"row {wrong.row} has {wrong}"
    text = str(failure)
    known = next((reason for pattern, reason in _KNOWN if pattern.search(text)), None)
    return known or f"it is no {file.suffix} file, or it is damaged"
