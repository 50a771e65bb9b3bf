"""Text of strangers that is printed: control characters in it would command the reader's terminal."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator

_COMMANDS = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Categories of Unicode: control characters, halves of pairs, separators of lines and of paragraphs."""


def is_plain(text: str) -> bool:
    """Whether text can be printed as it is, in one line."""
    return text.isprintable() or not any(map(_commands, text))


def plain(text: str, *, but: str = "") -> str:
    r"""Return text with control characters written out: ``\x1b``.

    Args:
        text: any text.
        but: characters that stay, e.g. a line break.
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
"""A name or a label in a body or a file."""
