"""Stop strings: a text ends before the first stop string, and a possible beginning of one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds stop strings in a text that comes in pieces.

    Args:
        strings: the stop strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found = False
        """Whether a stop string was found, so that the text is over."""

    def push(self, text: str) -> str:
        """Return the text that can be shown now."""
        if not self._strings:
            return text
        text = self._held + text
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        kept = max(_overlap(text, string) for string in self._strings)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """Return the text that was held back, after the last piece."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Return how many of the last characters of ``text`` may be the beginning of ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(string[:count])), 0)
