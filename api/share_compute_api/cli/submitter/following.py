"""Follows a job to its end: a progress bar for people, or one line of JSON per event for scripts."""

from __future__ import annotations

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from share_compute.lifecycle.states import JobState
from share_compute.store.records import EventRecord, JobRecord
from share_compute_api.client.client import Client
from share_compute_api.terminal.describe import event_line, next_steps, rows_speed, step_speed
from share_compute_api.terminal.output import console, print_fact, print_json

_EXIT_CODES = {JobState.succeeded: 0, JobState.failed: 10, JobState.cancelled: 11}
_INTERRUPTED = 130


def follow(client: Client, job: JobRecord, *, after: int = 0, as_json: bool = False) -> None:
    """Show a job's events until the job is finished, then exit with the exit code of its outcome.

    Ctrl-C ends this command, not the job.
    """
    try:
        if as_json:
            for event in client.follow(job.id, after=after):
                print_json(event, compact=True)
        else:
            _show(client, job, after)
    except KeyboardInterrupt:
        if not as_json:
            console.print(f"\nThe job continues. Follow it again: share-compute logs -f {job.id}")
        raise typer.Exit(_INTERRUPTED) from None
    job = client.job(job.id)
    if not as_json:
        show_end(job)
    raise typer.Exit(_EXIT_CODES[job.state])


def _show(client: Client, job: JobRecord, after: int) -> None:
    if not console.is_terminal or job.kind == "sweep":  # trials are printed as lines, not as steps of a bar
        for event in client.follow(job.id, after=after):
            console.print(event_line(event), soft_wrap=True)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        total, done = (job.rows.total, job.rows.done) if job.rows else (job.total_steps or None, job.step)
        task = progress.add_task(escape(job.name), total=total, completed=done, figures="")
        for event in client.follow(job.id, after=after):
            if event.kind == "step":
                _advance(progress, task, event)
            elif event.kind == "rows":
                data = event.data
                progress.update(task, total=data["total"], completed=data["done"], figures=rows_speed(data))
            elif event.kind != "ended":
                progress.console.print(event_line(event))


def _advance(progress: Progress, task: TaskID, event: EventRecord) -> None:
    data = event.data
    figures = f"loss {data['loss']:.4f}  {step_speed(data)}"
    progress.update(task, completed=data["step"], figures=figures)


def show_end(job: JobRecord) -> None:
    """Print why a job failed, and what the user can do next."""
    if job.state is JobState.failed:
        console.print(f"[red]failed:[/red] {escape(job.reason)}")
    if (steps := next_steps(job)) is not None:
        print_fact("next", steps)
