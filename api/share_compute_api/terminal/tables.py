"""Tables that fit every terminal: no id and no number is cut, and no line is longer than the terminal is wide."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.wide import divided, is_wide, units

_PROSE = frozenset({"reason", "meaning", "value", "label", "model", "why"})
"""Names of columns whose text may continue on the next line."""
_TRANSLATED = frozenset({"reason", "why", "what", "failure"})
"""Names of columns whose cells are texts of share-compute, and not data."""
_LEAST_PROSE = 20
"""Smallest width of a column of prose."""
_MOST_WORD = 30
"""Longest word, such as an id or a number, that is never divided; paths may be longer."""
_LEAST_COLUMNS = 3
"""Smallest number of columns of a table whose other columns follow below each row."""
_GAP = 2
"""Spaces between two columns."""
_DASH = Text("-", style="dim")


class WholeTable:
    """Table for a terminal or a pipe. Print it without cropping: ``console.print(WholeTable(...), crop=False)``.

    - If the table fits, only columns of prose continue on the next line, between words.
    - If it does not fit, the first columns form a table, and each row continues below with the names of the other
      columns. If fewer than three columns fit, each row is a paragraph.
    - Into a pipe, each row is one line.
    - Line breaks in cells are spaces.

    Only a word that is longer than the terminal is wide makes a longer line, so that users can copy it.

    Args:
        columns: names of the columns, as rich markup.
        rows: cells as rich markup. A None cell is a dash, or is left out below a row.
        right: names of the columns that are aligned at the right.
    """

    def __init__(
        self, columns: Iterable[str], rows: Iterable[Iterable[object]], *, right: Collection[str] = ()
    ) -> None:
        self._columns = tuple(map(_unbroken, columns))
        self._names = [Text.from_markup(heading(name)) for name in self._columns]
        self._right = frozenset(right)
        self._cells = [
            [self._cell(name, cell) for name, cell in zip(self._columns, row, strict=True)] for row in rows
        ]

    @staticmethod
    def _cell(column: str, cell: object) -> Text | None:
        if cell is None:
            return None
        text = _unbroken(str(cell))
        return Text.from_markup(translated(text) if column in _TRANSLATED else text)

    def __len__(self) -> int:
        return len(self._cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            yield from map(_unchanged, self._lines())
            return
        if self._fitting(options.max_width, wraps=True) == len(self._columns):
            yield from console.render(self._table(), options.update(no_wrap=False, overflow="fold"))
            return
        count = self._fitting(options.max_width, wraps=False)
        if count < _LEAST_COLUMNS:
            count = 1
        widths = [self._width(place, self._cells) for place in range(count)]
        if count > 1:
            yield _unchanged(self._line([_bold(name) for name in self._names[:count]], widths))
        for row in self._cells:
            yield _unchanged(self._line(row[:count], widths) if count > 1 else self._title(row[0]))
            for line in self._below(row, count, options.max_width):
                yield _unchanged(line)

    def _width(self, place: int, rows: Sequence[Sequence[Text | None]]) -> int:
        """Return the width of a column in one line."""
        return max(_width(text) for text in (self._names[place], *(row[place] for row in rows)))

    def _fitting(self, most: int, *, wraps: bool) -> int:
        """Return how many of the first columns fit into ``most`` characters, with or without wrapped prose."""
        used = -_GAP
        for place, name in enumerate(self._columns):
            width = self._width(place, self._cells)
            if wraps and name in _PROSE:
                words = (
                    cell_len(word.strip())
                    for row in self._cells
                    for word in units((row[place] or _DASH).plain)
                )
                longest = max((length for length in words if length <= _MOST_WORD), default=0)
                width = min(width, max(_LEAST_PROSE, self._names[place].cell_len, longest))
            used += _GAP + width
            if used > most:
                return place
        return len(self._columns)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, header in zip(self._columns, self._names, strict=True):
            right = "right" if name in self._right else "left"
            table.add_column(header, no_wrap=name not in _PROSE, justify=right, overflow="fold")  # type: ignore[arg-type]
        for row in self._cells:
            table.add_row(*(_DASH if cell is None else cell for cell in row))
        return table

    def _lines(self) -> Iterator[Text]:
        widths = [self._width(place, self._cells) for place in range(len(self._columns))]
        yield self._line([_bold(name) for name in self._names], widths)
        for row in self._cells:
            yield self._line(row, widths)

    def _line(self, row: Sequence[Text | None], widths: Sequence[int]) -> Text:
        """Return a row in columns of these widths."""
        line = Text()
        for name, cell, width in zip(self._columns, row, widths, strict=False):
            spaces = " " * (width - _width(cell))
            text = _DASH if cell is None else cell
            line.append_text(Text.assemble(spaces, text) if name in self._right else text + spaces)
            line.append(" " * _GAP)
        line.rstrip()
        return line

    def _title(self, cell: Text | None) -> Text:
        """Return the first line of a paragraph: the first cell, preceded by its column's name if it is a number."""
        title = _bold(cell or Text("-"))
        return (
            Text.assemble((f"{self._names[0].plain} ", "dim"), title) if title.plain[:1].isdigit() else title
        )

    def _below(self, row: Sequence[Text | None], count: int, most: int) -> Iterator[Text]:
        """Yield the lines below a row, with the names and the cells of the columns from ``count`` on."""
        line = Text()
        for name, cell in zip(self._names[count:], row[count:], strict=True):
            if not cell:
                continue
            part = Text.assemble((f"{name.plain} ", "dim"), cell) if name else cell
            if line and line.cell_len + _GAP + part.cell_len > most:
                yield line
                line = Text()
            first, *others = _wrapped(part, most - _GAP)
            line.append(" " * _GAP).append_text(first)
            for other in others:
                yield line
                line = Text(" " * _GAP).append_text(other)
        if line:
            yield line


def _wrapped(text: Text, most: int) -> list[Text]:
    """Return a text as lines of at most ``most`` cells.

    No word is divided, so a longer word has a longer line.
    """
    if is_wide(text.plain):
        return divided(text, most)
    lines = [Text()]
    for word in text.split(" "):
        if lines[-1] and lines[-1].cell_len + 1 + word.cell_len > most:
            lines.append(Text())
        lines[-1].append(" " if lines[-1] else "").append_text(word)
    return lines


def _unbroken(text: str) -> str:
    """Return a text with its line breaks replaced by spaces."""
    return text.replace("\n", " ")


def _unchanged(text: Text) -> Text:
    """Return a text that is printed in one line, regardless of its length."""
    text.no_wrap, text.overflow = True, "ignore"
    return text


def _bold(text: Text) -> Text:
    return Text.assemble((text.plain, "bold"))


def _width(cell: Text | None) -> int:
    return 1 if cell is None else cell.cell_len
