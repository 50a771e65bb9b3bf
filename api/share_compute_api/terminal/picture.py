"""Diagrams of plans for the terminal: layers over machines, and the timeline of one step with its pipeline bubbles.

The diagrams are readable without colour, and use ASCII characters on a terminal without UTF-8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from share_compute.planning.plan import Plan, StagePlan, layer_span
from share_compute.planning.report import TimelineCell
from share_compute.quantities import seconds_text
from share_compute_api.terminal.language import heading, translated

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_MOST_ROWS = 24
_NAME_COLUMNS = 18
_LEAST_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Ink:
    """Characters with which the diagrams are drawn."""

    block: str
    forward: str
    backward: str
    ending: str
    """Character for gradient sums and the weight update, which follow the last cell."""
    idle: str
    more: str
    bars: str
    """Characters for the bars of a chart, from low to high."""

    @classmethod
    def of(cls, console: Console) -> Ink:
        """Return the characters that a console can display."""
        if console.encoding.lower().startswith("utf"):
            return cls("█", "░", "▓", "+", "·", "…", "▁▂▃▄▅▆▇█")
        return cls("#", "-", "=", "+", ".", "~", "_.:-=+*#")


def layers_over_machines(plan: Plan, console: Console) -> Text:
    """Draw the layers from left to right, with one row per stage; a stage's bar covers the stage's layers."""
    ink = Ink.of(console)
    shown = plan.stages[:_MOST_ROWS]
    spans = [translated(layer_span(stage.start, stage.stop)) for stage in shown]
    before = max(map(cell_len, spans)) + 2
    names = max(
        12,
        min(
            2 * _NAME_COLUMNS,
            (console.width - before) // 2,
            max(cell_len(_names(stage, 99)) for stage in shown),
        ),
    )
    width = max(_LEAST_COLUMNS, console.width - before - names - 2)
    picture = Text()
    for index, (stage, span) in enumerate(zip(shown, spans, strict=True)):
        start = round(width * stage.start / plan.num_layers)
        length = max(1, round(width * stage.stop / plan.num_layers) - start)
        start = min(start, width - length)
        colour = colour_of(index)
        picture.append(set_cell_size(span, before), style="dim")
        picture.append(" " * start).append(ink.block * length, style=colour).append(
            " " * (width - start - length)
        )
        picture.append("  ").append(_names(stage, names), style=colour).append("\n")
    if len(plan.stages) > len(shown):
        more = translated(f"and {len(plan.stages) - len(shown)} more stages")
        picture.append(f"{ink.more} {more}\n", style="dim")
    picture.rstrip()
    return picture


def timeline(plan: Plan, cells: Sequence[TimelineCell], console: Console) -> Text:
    """Draw one step as a timeline with a row per member; a member is idle where no cell is drawn.

    The gradient sums and the weight update, which follow the last cell of all members, are drawn as one block.
    """
    ink = Ink.of(console)
    rows: dict[tuple[int, int], list[TimelineCell]] = defaultdict(list)
    for cell in cells:
        rows[cell.stage, cell.member].append(cell)
    keys = sorted(rows)[:_MOST_ROWS]
    labels = [cut(plan.stages[stage].members[member].name, _NAME_COLUMNS, ink) for stage, member in keys]
    before = max(map(cell_len, labels), default=0) + 2
    width = max(_LEAST_COLUMNS, console.width - before)
    cells_s = max((cell.stop_s for cell in cells), default=0.0)
    end_s = max(cells_s, plan.prediction.step_s if plan.prediction is not None else 0.0) or 1.0
    ending = width - max(1, round(width * cells_s / end_s))
    picture = Text()
    for key, label in zip(keys, labels, strict=True):
        row = _row(rows[key], end_s, width, colour_of(key[0]), ink)
        row.truncate(width - ending)
        row.append(ink.ending * ending, style="dim")
        picture.append(set_cell_size(label, before)).append_text(row).append("\n")
    if len(rows) > len(keys):
        more = translated(f"and {len(rows) - len(keys)} more machines")
        picture.append(f"{ink.more} {more}\n", style="dim")
    axis = f"0 s{seconds_text(end_s).rjust(width - 3)}"
    legend = [f"{ink.forward} {heading('forward')}", f"{ink.backward} {heading('backward')}"]
    legend += [f"{ink.ending} {translated('sums, update')}"] if ending else []
    legend += [f"{ink.idle} {heading('waits')}", translated("numbers: microbatches")]
    picture.append(" " * before + axis + "\n" + "  ".join(legend), style="dim")
    return picture


def _row(cells: Sequence[TimelineCell], end_s: float, width: int, colour: str, ink: Ink) -> Text:
    letters = [ink.idle] * width
    styles = ["dim"] * width
    for cell in sorted(cells, key=lambda cell: cell.start_s):
        first = min(round(width * cell.start_s / end_s), width - 1)
        stop = max(first + 1, min(width, round(width * cell.stop_s / end_s)))
        is_forward = cell.kind == "F"
        for column in range(first, stop):
            letters[column] = ink.forward if is_forward else ink.backward
            styles[column] = colour if is_forward else f"bold {colour}"
        number = str(cell.microbatch)
        # The number leaves one column of the cell free, so that numbers of neighbouring cells stay separate.
        if stop - first > len(number):
            letters[first : first + len(number)] = number
            styles[first : first + len(number)] = ["reverse " + styles[first]] * len(number)
    text = Text()
    for letter, style in zip(letters, styles, strict=True):
        text.append(letter, style=style)
    return text


def colour_of(stage: int) -> str:
    """Return the name of the colour for the stage with this index; colours repeat."""
    return COLOURS[stage % len(COLOURS)]


def cut(text: str, columns: int, ink: Ink) -> str:
    """Return text cut to at most ``columns`` cells; cut text ends with `Ink.more`."""
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1).rstrip() + ink.more


def _names(stage: StagePlan, columns: int) -> str:
    """Return a stage's member names in at most ``columns`` cells, with the number of omitted names."""
    names = [member.name for member in stage.members]
    for count in range(len(names), 0, -1):
        more = [translated(f"{len(names) - count} more")] if count < len(names) else []
        text = " + ".join([*names[:count], *more])
        if cell_len(text) <= columns:
            return text
        if count == 1:
            return set_cell_size(text, columns)
    return ""
