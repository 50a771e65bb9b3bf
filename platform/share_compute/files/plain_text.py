"""Safe printing of untrusted text: escape control characters, which would act on the reader's terminal."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator

_COMMANDS = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Refused Unicode categories: control characters, surrogates, line separators and paragraph separators."""


def is_plain(text: str) -> bool:
    """Return whether text has no control characters, surrogates or line breaks."""
    return text.isprintable() or not any(map(_commands, text))


def plain(text: str, *, but: str = "") -> str:
    r"""Return text with control characters, surrogates and line breaks escaped, e.g. ``\x1b``.

    Args:
        text: any text.
        but: characters that are kept, e.g. a line break.
    """
    if is_plain(text):
        return text
    return "".join(
        ascii(letter)[1:-1] if _commands(letter) and letter not in but else letter for letter in text
    )


def _commands(letter: str) -> bool:
    return unicodedata.category(letter) in _COMMANDS


def _checked(text: str) -> str:
    if not is_plain(text):
        raise ValueError("must have no control characters and no line breaks")
    return text


PlainText = Annotated[str, AfterValidator(_checked)]
"""Name or label in a request body or a file, without control characters and line breaks."""
