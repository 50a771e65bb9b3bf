"""Errors of readers, which name file and line, and checks of numbers that all readers share."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from share_compute.errors import UserError
from share_compute.quantities import clipped
from share_compute.sparse.keys import KEY_LIMIT

BLOCK_BYTES = 4 << 20
"""Bytes of a text file that are read at a time. A line must be shorter."""
MOST_VALUE = 1e12
"""Largest magnitude of a value, so that squares of gradients are finite as float32 sums."""
_INTEGER = re.compile(r"[0-9]{1,19}")


def wrong_line(file: object, line: int, what: str, hint: str) -> UserError:
    """Return the error for a line that cannot be read."""
    return UserError(f"data file {file}, line {line}: {what}", hint=hint)


def key_problem(text: str) -> str | None:
    """Return the defect of a key, or None."""
    if _INTEGER.fullmatch(text):
        return None if int(text) < KEY_LIMIT else f"key {text} is not below 2^63"
    if text.startswith("-") and text[1:].isdigit():
        return f"key {clipped(text, 40)} is negative"
    if text.isdigit() and text.isascii():
        return f"key {clipped(text, 40)} is not below 2^63"
    return f"key {clipped(text, 40)!r} is no whole number"


def value_problem(text: str) -> str | None:
    """Return the defect of a value, or None."""
    try:
        value = float(text)
    except ValueError:
        return f"value {clipped(text, 40)!r} is no number"
    if np.isnan(value):
        return "a value is NaN"
    return None if abs(value) <= MOST_VALUE else f"value {clipped(text, 40)} is beyond {MOST_VALUE:g}"


def are_plain(values: NDArray[np.float64]) -> bool:
    """Return whether all values are finite and of bounded size."""
    return bool((np.abs(values) <= MOST_VALUE).all())
