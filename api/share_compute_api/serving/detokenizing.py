"""Token by token into text: characters that take several tokens are held back until they are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_BROKEN = "\ufffd"
_CONTEXT_TOKENS = 5
"""Of the prompt: some tokenizers write a token otherwise where a text begins."""
_MOST_BYTES = 3
"""Of a character that is not whole; it has at most so many tokens, and shows as at most so many U+FFFD."""
_WINDOW_TOKENS = 16


class Decodes(Protocol):
    """Turns token ids into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, without special tokens; what is no valid UTF-8 becomes U+FFFD."""

    def is_special(self, id_: int) -> bool:
        """Return whether a token is no text."""


class Detokenizer:
    """Gives the text that each token adds. A token costs the decoding of a handful, however long the text is.

    Args:
        tokenizer: of the model.
        prompt: what stands before the first token.
    """

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        """Tokens whose text was told, as the context of the next ones, then those whose text was not, or not all."""
        self._context = len(self._window)
        self._told = len(tokenizer.decode(self._window))
        """Characters of the window's text that were told."""

    def push(self, id_: int) -> str:
        """Return the text that is certain now; empty while a character is not whole."""
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
            # More than one character can have: all but what the last tokens may have begun is certain.
            broken = len(text) - len(text.rstrip(_BROKEN))
            new = self._tell(text, len(text) - min(broken, _MOST_BYTES))
        else:
            new = ""
        return new + self._shrink(text)

    def flush(self) -> str:
        """Return the rest: nothing more comes."""
        text = self._tokenizer.decode(self._window)
        return self._tell(text, len(text))

    def _tell(self, text: str, stop: int) -> str:
        new = text[self._told : stop]
        self._told = max(self._told, stop)
        return new

    def _shrink(self, text: str) -> str:
        """Forget the older half of a window that got long, which only tokens do that are no text together."""
        if len(self._window) <= _WINDOW_TOKENS:
            return ""
        decode, window, half = self._tokenizer.decode, self._window, _WINDOW_TOKENS // 2
        # Best where no character is cut.
        cuts = range(half, 0, -1)
        cut = next((at for at in cuts if decode(window[:at]) + decode(window[at:]) == text), half)
        gone = len(decode(window[:cut]))
        new = self._tell(text, gone)
        del window[:cut]
        self._context = max(0, self._context - cut)
        self._told -= gone
        return new
