"""Follows a job to its end: a progress bar for people, or one line of JSON per event for scripts."""

from __future__ import annotations

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from share_compute.lifecycle.states import JobState
from share_compute.store.records import EventRecord, JobRecord
from share_compute_api.client.client import Client
from share_compute_api.terminal.describe import event_line, rows_speed, step_speed
from share_compute_api.terminal.output import console, print_json

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
        show_end(client, job)
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


def show_end(client: Client, job: JobRecord) -> None:
    """Print how to fetch the results of a job that succeeded, or why it failed."""
    if job.state is JobState.succeeded:
        for artifact in client.artifacts(job.id):
            command = f"share-compute artifacts get {job.id} {artifact.name}"
            console.print(f"Fetch the result: {escape(command)}")
    elif job.state is JobState.failed:
        console.print(f"[red]failed:[/red] {escape(job.reason)}")
        hint = (job.error or {}).get("hint") or f"share-compute resume {job.id}"
        console.print(f"        {hint}", style="dim", markup=False)
