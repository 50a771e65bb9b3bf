"""Shows the last rounds of a job: a picture of the times in which each branch computed and waited, and the figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from share_compute.quantities import bytes_text, seconds_text
from share_compute_api.schemas.rounds import BranchView, RoundsView, RoundView
from share_compute_api.terminal.describe import LEAST_RATIO
from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.output import console, number, print_table
from share_compute_api.terminal.picture import Ink, cut

_MOST_ROWS = 24
"""Maximum number of branches that are shown."""
_LEAST_COLUMNS = 8
"""Smallest width of a round, with the space before the next one."""


def print_rounds(view: RoundsView, *, merges_apart: bool) -> None:
    """Print the picture and the figures of the last rounds; print nothing before the first merge.

    Args:
        view: the last rounds.
        merges_apart: whether each contribution is merged alone, as soon as it arrives.
    """
    if not view.rounds:
        return
    last = view.rounds[-1]
    parts = [f"{'merge' if merges_apart else 'round'} {last.round} after step {last.step}"]
    parts.append(f"each branch received {bytes_text(last.update_bytes)}")
    if last.compression_ratio is not None and last.compression_ratio >= LEAST_RATIO:
        parts.append(f"{last.compression_ratio:.3g} times less than float32")
    if last.consensus_distance is not None:
        parts.append(f"consensus distance {last.consensus_distance:.3g}")
    console.print()
    console.print("; ".join(map(translated, parts)), markup=False)
    console.print(picture(view.rounds, console, merges_apart=merges_apart))
    console.print()
    branches = _branches(view.rounds)
    columns = ("branch", "round", "machines", "loss", "computing", "waiting", "sent", "staleness")
    rows = [_figures(view.rounds, branch) for branch in branches[:_MOST_ROWS]]
    print_table(columns, rows, empty="")
    if len(branches) > _MOST_ROWS:
        console.print(f"[dim]and {len(branches) - _MOST_ROWS} more branches; --json has them all[/dim]")


def picture(rounds: Sequence[RoundView], terminal: Console, *, merges_apart: bool) -> Text:
    """Draw the last rounds from left to right, with one row per branch; bars of all rounds have the same scale.

    Args:
        rounds: the rounds, oldest first, at least one.
        terminal: the console on which the picture is shown.
        merges_apart: whether each contribution is merged alone, so that a branch is missing from most merges.
    """
    ink = Ink.of(terminal)
    branches = _branches(rounds)
    labels = [f"{heading('branch')} {branch}" for branch in branches[:_MOST_ROWS]]
    title = heading("merge" if merges_apart else "round")
    before = max(map(cell_len, (title, *labels))) + 2
    columns = terminal.width - before
    shown = rounds[-max(1, min(len(rounds), columns // _LEAST_COLUMNS)) :]
    width = max(2, columns // len(shown) - 1)
    longest_s = max((_time_s(run) for one in shown for run in one.branches), default=0.0)
    scale = width / max(longest_s, 1e-9)
    numbers = " ".join(_cell(str(one.round), width, ink) for one in shown).rstrip()
    text = Text().append(f"{set_cell_size(title, before)}{numbers}\n", style="dim")
    for label, branch in zip(labels, branches, strict=False):
        row = Text(set_cell_size(label, before))
        for one in shown:
            row.append_text(_bar(one, branch, width, scale, ink, merges_apart=merges_apart)).append(" ")
        row.rstrip()
        text.append_text(row).append("\n")
    if len(branches) > len(labels):
        more = translated(f"and {len(branches) - len(labels)} more branches")
        text.append(f"{ink.more} {more}\n", style="dim")
    runs = [run for one in shown for run in one.branches]
    keys = [f"{ink.block} {heading('computing')}"]
    if not merges_apart and any(run.staleness for run in runs):
        keys.append(f"{ink.backward} {translated('computing, late')}")
    if any(run.waited_s for run in runs):
        keys.append(f"{ink.idle} {heading('waiting')}")
    if any(run.other_s for run in runs):
        keys.append(f"{ink.forward} {translated('exchange and other work')}")
    return text.append(" " * before + "  ".join(keys), style="dim")


def _bar(one: RoundView, branch: int, width: int, scale: float, ink: Ink, *, merges_apart: bool) -> Text:
    """Return the bar of a branch in a round, which has ``width`` characters."""
    run = _newest([one], branch)
    if run is None:
        missing = heading("missing") if branch in one.missing else ""
        return Text(_cell(missing, width, ink), style="yellow")
    is_late = run.staleness > 0 and not merges_apart
    parts = (
        (run.seconds, ink.backward if is_late else ink.block, "yellow" if is_late else "cyan"),
        (run.waited_s, ink.idle, "dim"),
        (run.other_s or 0.0, ink.forward, "dim"),
    )
    bar, time_s = Text(), 0.0
    for seconds, letter, style in parts:
        time_s += seconds
        # A short time gets one letter if there is space, so that no branch seems to compute nothing.
        letters = max(round(scale * time_s) - len(bar), 1 if seconds > 0 and letter != ink.forward else 0)
        bar.append(letter * min(letters, width - len(bar)), style=style)
    return bar.append(" " * (width - len(bar)))


def _cell(text: str, width: int, ink: Ink) -> str:
    """Return text in exactly ``width`` cells."""
    return set_cell_size(cut(text, width, ink), width)


def _figures(rounds: Sequence[RoundView], branch: int) -> list[str | None]:
    """Return the cells of a branch's newest contribution."""
    run = _newest(rounds, branch)
    if run is None:
        return [str(branch), f"[yellow]{heading('missing')}[/yellow]", *[None] * 6]
    names = next(iter(run.machines.values()), "")
    if len(run.machines) > 1:
        names += f" +{len(run.machines) - 1}"
    return [
        str(branch),
        str(run.round),
        escape(names),
        number(run.loss),
        seconds_text(run.seconds),
        seconds_text(run.waited_s) if run.waited_s else None,
        bytes_text(run.sent_bytes),
        str(run.staleness),
    ]


def _branches(rounds: Sequence[RoundView]) -> list[int]:
    """Return the numbers of the branches in some rounds, ascending."""
    return sorted(
        {number for one in rounds for number in (*(run.number for run in one.branches), *one.missing)}
    )


def _newest(rounds: Sequence[RoundView], branch: int) -> BranchView | None:
    """Return the newest contribution of a branch in some rounds; None if there is none."""
    runs = [run for one in rounds for run in one.branches if run.number == branch]
    return max(runs, key=lambda run: run.round, default=None)


def _time_s(run: BranchView) -> float:
    return run.seconds + run.waited_s + (run.other_s or 0.0)
