"""Wraps texts with Chinese characters, which have no spaces between words; rich divides lines only at spaces.

The rules are a subset of those of UAX #14 (Unicode Line Breaking Algorithm) for ideographs: a line may end before and
after each wide character, but no line begins with a closing mark, and none ends with an opening one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod
from rich.containers import Lines
from rich.measure import Measurement
from rich.text import Text

_OPENING = frozenset({"Ps", "Pi"})
_CLOSING = frozenset({"Pe", "Pf", "Po"})
"""Categories of Unicode of the marks that stay with the character before them; ``Po`` has commas and full stops."""


class WideText(Text):
    """Text with wide characters; lines may end between wide characters."""

    @classmethod
    def of(cls, text: Text) -> WideText:
        """Return a text with the content and the styles of another."""
        return cls(
            text.plain,
            style=text.style,
            justify=text.justify,
            overflow=text.overflow,
            no_wrap=text.no_wrap,
            end=text.end,
            tab_size=text.tab_size,
            spans=text.spans,
        )

    def wrap(
        self,
        console: Console,
        width: int,
        *,
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        tab_size: int = 8,
        no_wrap: bool | None = None,
    ) -> Lines:
        """Return the text as lines of at most ``width`` cells."""
        is_whole = self.no_wrap if no_wrap is None else no_wrap
        lines = Lines()
        for line in self.split(allow_blank=True):
            for part in [line] if is_whole or overflow == "ignore" else divided(line, width):
                lines.extend(
                    part.wrap(
                        console,
                        width,
                        justify=justify or self.justify,
                        overflow=overflow or self.overflow,
                        tab_size=tab_size,
                        no_wrap=is_whole,
                    )
                )
        return lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        whole = super().__rich_measure__(console, options)
        return Measurement(
            max((cell_len(unit.strip()) for unit in units(self.plain)), default=0), whole.maximum
        )


def is_wide(text: str) -> bool:
    """Return whether a text has characters that are two cells wide."""
    return not text.isascii() and any(cell_len(character) > 1 for character in text)


def divided(text: Text, most: int) -> list[Text]:
    """Return a text as lines of at most ``most`` cells; only a longer unit gets a longer line."""
    places, place, used = [], 0, 0
    for unit in units(text.plain):
        if used and used + cell_len(unit.rstrip()) > most:
            places.append(place)
            used = 0
        used += cell_len(unit)
        place += len(unit)
    lines = [*text.divide(places)]
    for line in lines[:-1]:
        line.rstrip()
    return lines


def units(text: str) -> Iterator[str]:
    """Yield the parts of a text between which a line may end: words with the spaces behind them, and wide characters.

    Marks belong to the part that they open or close.
    """
    start = 0
    for place in range(1, len(text)):
        if _may_end(text[place - 1], text[place]):
            yield text[start:place]
            start = place
    if text:
        yield text[start:]


def _may_end(last: str, following: str) -> bool:
    """Return whether a line may end between these characters."""
    if following.isspace() or cell_len(following) == 0:  # such as accents, and joiners of emoji
        return False
    if last.isspace():
        return True
    if cell_len(last) < 2 and cell_len(following) < 2:
        return False
    return unicodedata.category(last) not in _OPENING and unicodedata.category(following) not in _CLOSING
