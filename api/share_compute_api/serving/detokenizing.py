"""Decodes tokens to text one by one; a character that takes several tokens is held back until it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_BROKEN = "\ufffd"
_CONTEXT_TOKENS = 5
"""Tokens of the prompt that are kept as context: some tokenizers decode a token differently where a text begins."""
_MOST_BYTES = 3
"""Most bytes of an incomplete character. It has at most as many tokens, and decodes to at most as many U+FFFD."""
_WINDOW_TOKENS = 16


class Decodes(Protocol):
    """Turns token ids into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, without special tokens; bytes that are not valid UTF-8 become U+FFFD."""

    def is_special(self, id_: int) -> bool:
        """Return whether a token is special, so that it has no text."""


class Detokenizer:
    """Returns the text that each token adds. A token costs the decoding of a few tokens, however long the text is.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the tokens before the first one.
    """

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        """Tokens whose text was returned, as the context of the next ones; then tokens whose text was not, or not all
        of it."""
        self._context = len(self._window)
        self._told = len(tokenizer.decode(self._window))
        """Characters of the window's text that were returned."""

    def push(self, id_: int) -> str:
        """Return the text that is certain now; empty while a character is incomplete."""
        if self._tokenizer.is_special(id_):
            return ""
        self._window.append(id_)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(_BROKEN):
            new = self._tell(text, len(text))
            if new:
                del self._window[: self._context]
                self._context = len(self._window)
                self._told = len(self._tokenizer.decode(self._window))
        elif len(self._window) - self._context > _MOST_BYTES:
            # One character has no more tokens than this: all text is certain except a character that the last tokens
            # began.
            broken = len(text) - len(text.rstrip(_BROKEN))
            new = self._tell(text, len(text) - min(broken, _MOST_BYTES))
        else:
            new = ""
        return new + self._shrink(text)

    def flush(self) -> str:
        """Return the remaining text, after the last token."""
        text = self._tokenizer.decode(self._window)
        return self._tell(text, len(text))

    def _tell(self, text: str, stop: int) -> str:
        new = text[self._told : stop]
        self._told = max(self._told, stop)
        return new

    def _shrink(self, text: str) -> str:
        """Drop the older half of a window that got long, which only happens with tokens that together are no text."""
        if len(self._window) <= _WINDOW_TOKENS:
            return ""
        decode, window, half = self._tokenizer.decode, self._window, _WINDOW_TOKENS // 2
        # Cuts between characters are preferred.
        cuts = range(half, 0, -1)
        cut = next((at for at in cuts if decode(window[:at]) + decode(window[at:]) == text), half)
        gone = len(decode(window[:cut]))
        new = self._tell(text, gone)
        del window[:cut]
        self._context = max(0, self._context - cut)
        self._told -= gone
        return new
