"""``share-compute tune``: measures settings of a job on the cluster, and writes the job file with the fastest ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from share_compute.errors import Unavailable, UserError
from share_compute.quantities import seconds_text
from share_compute_api.terminal.fetching import once_fetched
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import Terminal, console, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from share_compute_api.client.tuning import Tuned, TuningRun


def tune(
    file: Annotated[Path, typer.Argument(help="Job file (YAML or JSON), or - for standard input.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the job with the fastest settings.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, max=1000, help="Measured steps of each run.")] = 12,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting to leave as it is: microbatches, threads, precision or compile; repeatable."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure microbatches, threads, precision and compiled code by short runs, and write the fastest settings.

    All four change the bits of results. Precision also changes losses, and so do microbatches of models with dropout.
    The output says which settings changed.
    """
    from share_compute.files.plain_yaml import read_yaml
    from share_compute.specification import parse_job
    from share_compute_api.client.client import Client
    from share_compute_api.client.job_file import read_text, with_full_paths, with_plan
    from share_compute_api.client.tuning import TUNED, TuningJobs, best_of, fixed_settings
    from share_compute_api.client.tuning import tune as tuned

    for name in keep or ():
        if name not in TUNED:
            raise UserError(f"--keep: tune knows no setting {name}", hint=f"known: {', '.join(TUNED)}")
    if output is not None:
        _require_writable(output)
    is_piped = str(file) == "-"
    text = sys.stdin.read() if is_piped else read_text(file)
    folder = Path.cwd() if is_piped else file.parent
    job = with_full_paths(parse_job(with_plan(text, folder)), folder)
    names = [name for name in TUNED if name not in (keep or ())]
    runs: list[TuningRun] = []
    with Client() as client, _progress(as_json=as_json) as note:
        # Without a terminal, a line for each poll would be too many.
        is_silent = as_json or not sys.stderr.isatty()
        jobs = TuningJobs(client, job, steps, note, partial(once_fetched, as_json=is_silent, note=note))
        runs.extend(tuned(job, jobs.measure, names))
    best = best_of(runs)
    changes = _changes(runs[0], best)
    fixed = {name: reason for name, reason in fixed_settings(job).items() if name in names}
    if as_json:
        print_json(_document(runs, best, changes, fixed))
    else:
        _print(runs, best, changes, fixed)
    if output is None:
        return
    source = read_yaml(text, "job file")
    if output.parent.resolve() != folder.resolve():
        source = job.model_dump(mode="json")  # relative paths would name other files there
    _write(output, best.settings.document(source))
    if not as_json:
        console.print(f"{output}: the job with these settings", soft_wrap=True, markup=False)


@contextmanager
def _progress(*, as_json: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the present measurement on standard error."""
    errors = Terminal(stderr=True, soft_wrap=True)
    if as_json:
        yield lambda _: None
    elif errors.is_terminal:
        with errors.status("waiting for the first run") as status:
            yield lambda line: status.update(escape(line))
    else:
        yield lambda line: errors.print(escape(line))


def _changes(first: TuningRun, best: TuningRun) -> dict[Tuned, tuple[Any, Any]]:
    from share_compute_api.client.tuning import TUNED

    values = {name: (getattr(first.settings, name), getattr(best.settings, name)) for name in TUNED}
    return {name: (old, new) for name, (old, new) in values.items() if old != new}


def _document(
    runs: Sequence[TuningRun],
    best: TuningRun,
    changes: dict[Tuned, tuple[Any, Any]],
    fixed: dict[Tuned, str],
) -> dict[str, Any]:
    from dataclasses import asdict

    from share_compute_api.client.tuning import FIELDS, NUMERICS

    return {
        "runs": [asdict(run) for run in runs],
        "best": runs.index(best),
        "changes": [
            {"field": FIELDS[name], "from": old, "to": new, "numerics": NUMERICS[name]}
            for name, (old, new) in changes.items()
        ],
        "kept": [{"field": FIELDS[name], "reason": reason} for name, reason in fixed.items()],
    }


def _print(
    runs: Sequence[TuningRun],
    best: TuningRun,
    changes: dict[Tuned, tuple[Any, Any]],
    fixed: dict[Tuned, str],
) -> None:
    from share_compute_api.client.tuning import FIELDS, NUMERICS

    has_failed = any(run.step_s is None for run in runs)
    rows = (
        (
            f"{number} *" if run is best else str(number),
            run.microbatches or run.settings.microbatches,
            run.threads or run.settings.threads,
            run.settings.precision,
            run.settings.compile,
            None if run.step_s is None else seconds_text(run.step_s),
            *([escape(run.problem) if run.step_s is None else ""] if has_failed else []),
        )
        for number, run in enumerate(runs, 1)
    )
    columns = ("run", "microbatches", "threads", "precision", "compile", "step")
    print_table((*columns, "reason") if has_failed else columns, rows, empty="")
    for number, run in enumerate(runs, 1):
        if run.computation is not None:
            console.print(
                f"Computation of run {number}: {escape(run.computation)}.", style="dim", soft_wrap=True
            )
    first_s, best_s = runs[0].step_s or 0.0, best.step_s or 0.0
    if not changes:
        console.print("The present settings are the fastest ones that were measured.")
    else:
        console.print(
            f"Steps of run {runs.index(best) + 1} take {best_s / first_s:.0%} of the time of run 1:"
        )
    for name, (old, new) in changes.items():
        before = "not given" if old is None else old
        console.print(f"  {FIELDS[name]} changes from {before} to {new}: {NUMERICS[name]}.", soft_wrap=True)
    for name, reason in fixed.items():
        console.print(f"  {FIELDS[name]} is kept: {reason}.", style="dim", soft_wrap=True)


def _write(output: Path, document: dict[str, Any]) -> None:
    from share_compute.files.plain_yaml import write_yaml

    with _writing(output):
        output.write_text(write_yaml(document), encoding="utf-8")


def _require_writable(output: Path) -> None:
    """Raise Unavailable if a file cannot be written; leave no file behind."""
    with _writing(output):
        is_new = not output.exists()
        with output.open("a"):
            pass
        if is_new:
            output.unlink()


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise Unavailable(
            f"{output} cannot be written: {failure.strerror or failure}",
            hint="free space, or choose another --output",
        ) from failure
