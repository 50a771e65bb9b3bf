"""Commands for jobs: ``submit``, ``jobs``, ``show``, ``logs``, ``cancel``, ``resume``, ``metrics``."""

from __future__ import annotations

import io
import json
import sys
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from share_compute.errors import Unavailable, UserError
from share_compute.files.series import SeriesFormat
from share_compute.lifecycle.states import JobState
from share_compute.quantities import bytes_text
from share_compute_api.cli.submitter.serve import report_deployment
from share_compute_api.terminal.fetching import once_fetched
from share_compute_api.terminal.language import translated
from share_compute_api.terminal.options import Job, Json, duration_s
from share_compute_api.terminal.output import (
    console,
    duration,
    number,
    print_bytes,
    print_fact,
    print_items,
    print_json,
    print_table,
    since,
    speed,
    state_text,
)

if TYPE_CHECKING:
    from share_compute.store.records import EventRecord, JobRecord
    from share_compute_api.client.client import Client

_PAGE = 5000
"""Number of events in a request."""
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show progress until the job is over.")]


def submit(
    file: Annotated[Path, typer.Argument(help="Job file (YAML or JSON), or - for standard input.")],
    follow: Follow = False,
    as_json: Json = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="Key for safe retries: repeated with the same job, it makes no second job."),
    ] = None,
) -> None:
    """Submit a job (kind: train, sparse, sweep, generate or embed), or serve a model (kind: serve).

    Relative paths in the file are resolved against the file's folder.
    """
    from share_compute.specification import ServeJob
    from share_compute_api.client.client import Client
    from share_compute_api.client.job_file import in_file, read_submission

    spec = read_submission(file)
    with Client() as client, in_file(file, only_fields=True):
        if isinstance(spec, ServeJob):
            report_deployment(
                once_fetched(lambda: client.deploy(spec), as_json=as_json), client.url, as_json=as_json
            )
            return
        submit_it = partial(client.submit, spec, idempotency_key=idempotency_key)
        job = once_fetched(submit_it, as_json=as_json)
        _report(job, as_json=as_json, compact=follow)
        if follow:
            _follow(client, job, as_json=as_json)


def list_jobs(
    state: Annotated[
        list[JobState] | None,
        typer.Option(
            metavar="STATE",
            help="Only jobs in this state: queued, planning, running, succeeded, failed or cancelled; repeatable.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs whose name contains this.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only jobs with this tag; repeatable.")] = None,
    group: Annotated[str | None, typer.Option(help="Only jobs of this group.")] = None,
    trials: Annotated[
        bool, typer.Option("--trials", help="Show trials of sweeps, too; --group shows them always.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Most jobs to show.")] = 20,
    as_json: Json = False,
) -> None:
    """List jobs, newest first. Trials of sweeps are left out."""
    from share_compute_api.client.client import Client
    from share_compute_api.terminal.describe import progress

    with Client() as client:
        page = client.jobs(
            state=state or (), name=name, tags=tag or (), group=group, trials=trials, limit=limit
        )
    if as_json:
        print_items(page.jobs, next_cursor=page.next_cursor)
        return
    rows = (
        (
            job.id,
            escape(job.name),
            state_text(job.state),
            progress(job),
            number(job.loss),
            speed(job.tokens_per_s, of_tokens=job.counts_tokens),
            since(job.created_at),
            escape(job.reason),
        )
        for job in page.jobs
    )
    columns = ("id", "name", "state", "done", "loss", "speed", "submitted", "reason")
    is_filtered = any((state, name, tag, group))
    none = (
        "No job matches."
        if is_filtered
        else "No jobs yet. Submit one: share-compute submit examples/tiny-llama.yaml"
    )
    print_table(columns, rows, empty=none)
    if page.next_cursor:
        console.print("[dim]There are more; raise --limit to see them.[/dim]")


def show(
    job: Job,
    best: Annotated[bool, typer.Option("--best", help="Print the job file of a sweep's best trial.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show each machine's share of the plan, with the reason.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show one job: its state, its progress, the placement of layers on machines, and the last rounds or trials."""
    from share_compute.specification import TrainJob
    from share_compute_api.cli.submitter.sweeps import print_best, print_trials
    from share_compute_api.client.client import Client
    from share_compute_api.client.load import left_s
    from share_compute_api.terminal.describe import (
        done_fact,
        link_text,
        next_steps,
        placement,
        plan_lines,
        protection_text,
        results_text,
        step_times,
    )
    from share_compute_api.terminal.rounds import print_rounds

    with Client() as client:
        record = client.job(job)
        if best:
            print_best(client, record)
            return
        view = client.trials(job) if record.kind == "sweep" else None
        policy = record.spec.training.rounds if isinstance(record.spec, TrainJob) else None
        rounds = None if policy is None else client.rounds(job)
        results = client.compare([job]).jobs[0].results if record.counts_steps else {}
    if as_json:
        more = {"trials": view} if view is not None else dict(rounds) if rounds is not None else {}
        print_json({**dict(record), "results": results, **more})
        return
    plan = placement(record.plan) if record.plan else None
    remaining_s = left_s(record) if record.state == JobState.running and record.counts_steps else None
    facts: dict[str, Any] = {
        "id": record.id,
        "name": escape(record.name),
        "state": state_text(record.state),
        "reason": escape(record.reason),
        "attempt": record.attempt,
        **done_fact(record),
        "loss": number(record.loss),
        "validation": results_text(results, "validation"),
        "test": results_text(results, "test"),
        "speed": speed(record.tokens_per_s, of_tokens=record.counts_tokens),
        "left": None if remaining_s is None else f"about {duration(remaining_s)}",
        "tags": escape(", ".join(record.tags)) or None,
        "group": escape(record.group) if record.group else None,
        "note": escape(record.note) or None,
        "sweep": record.sweep_id,
        "submitted": since(record.created_at),
        "started": since(record.started_at),
        "finished": since(record.finished_at),
        "checkpoint": None if record.checkpoint_step is None else f"step {record.checkpoint_step}",
        "protected": protection_text(record),
        "computation": escape(record.computation) if record.computation else None,
        "measured": step_times(record.measured) if record.measured else None,
        "proposal": escape(record.proposal.sentence) if record.proposal else None,
        **{f"then.{link.name}": link_text(link) for link in record.links},
        "placement": escape(plan) if plan else None,
    }
    for name, value in facts.items():
        if value is not None:
            print_fact(name, value)
    for name, value in plan_lines(record.plan) if record.plan and everything else ():
        print_fact(name, escape(value), soft_wrap=True)
    if record.plan and not everything:
        console.print(
            f"[dim]Each machine's share, with the reason: share-compute show {record.id} --all[/dim]"
        )
    if view is not None:
        console.print()
        print_trials(record, view)
    if policy is not None and rounds is not None:
        print_rounds(rounds, merges_apart=policy.merges_apart)
    if (steps := next_steps(record)) is not None:
        console.print()
        print_fact("next", steps)


def logs(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last events, this many of them.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only events of the last time, e.g. 90s, 10m, 2h or 7d.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the events of a job; with -f, follow its newest attempt until the job is finished.

    With --tail or --since, -f first prints the events that these options name.
    """
    from share_compute_api.client.client import Client

    with Client() as client:
        record = client.job(job)
        after, until = 0, None
        if tail is not None or since is not None:
            since_s = None if since is None else duration_s(since, "--since")
            after, until = _wanted(client, job, tail, since_s)
        if until is not None or not follow:
            _print_events(client, job, after, until, as_json=as_json)
        if follow:
            _follow(client, record, after=until, as_json=as_json)


def cancel(job: Job, as_json: Json = False) -> None:
    """Cancel a job. The job stops at once, and keeps its checkpoints or finished rows.

    For a job that has succeeded, links (`then`) that wait are cancelled.
    """
    from share_compute_api.client.client import Client

    with Client() as client:
        record = client.cancel(job)
    if as_json or record.state.is_final:
        _report(record, as_json=as_json)
    else:
        kept = "; the rows that are done are kept"
        if record.spec.kind == "sweep":
            kept = "; its trials keep their checkpoints"
        elif record.counts_steps:
            kept = "; so far it has no checkpoint to resume from"
            if record.checkpoint_step is not None:
                kept = f"; its last checkpoint, so far of step {record.checkpoint_step}, is kept"
        console.print(f"{record.id} stops now{kept}")


def resume(job: Job, follow: Follow = False, as_json: Json = False) -> None:
    """Queue a failed or cancelled job again; it continues from its last checkpoint or finished rows.

    For a job that has succeeded, links (`then`) that failed or were cancelled are started again.
    """
    from share_compute_api.client.client import Client

    with Client() as client:
        record = client.resume(job)
        _report(record, as_json=as_json, compact=follow)
        if follow:
            _follow(client, record, as_json=as_json)


def metrics(
    job: Job,
    format_: Annotated[
        SeriesFormat | None, typer.Option("--format", help="Write all series in this format.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: standard output.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the metrics of a job, step by step; or write losses, metrics, learning rate, speed and bytes to a file."""
    from share_compute.specification.task import METRICS_BESIDE_LOSS
    from share_compute_api.client.client import Client
    from share_compute_api.terminal.describe import step_speed

    if output is not None and format_ is None:
        format_ = _format_of(output)
    with Client() as client:
        if as_json and format_ is None:
            written = io.BytesIO()
            client.metrics_file(job, "json", written.write)
            print_items(json.loads(written.getvalue()))
            return
        if format_ is not None:
            _write_series(client, job, format_, output)
            return
        records = client.metrics(job)
    measured = [
        name for name in METRICS_BESIDE_LOSS if any(record.data.get(name) is not None for record in records)
    ]
    of_tasks = list(dict.fromkeys(name for record in records for name in record.data.get("tasks") or {}))
    rows = (
        (
            record.step,
            record.split,
            number(record.data["loss"], 5),
            number(record.data.get("learning_rate"), 3),
            step_speed(record.data) if record.split == "train" else None,
            *(number(record.data.get(name)) for name in measured),
            *(number((record.data.get("tasks") or {}).get(name)) for name in of_tasks),
        )
        for record in records
    )
    columns = (
        "step",
        "split",
        "loss",
        "learning rate",
        "speed",
        *(name.replace("_", " ") for name in (*measured, *of_tasks)),
    )
    print_table(columns, rows, empty="Nothing measured yet.")


def _format_of(output: Path) -> SeriesFormat:
    formats: dict[str, SeriesFormat] = {".csv": "csv", ".json": "json", ".parquet": "parquet"}
    if output.suffix in formats:
        return formats[output.suffix]
    raise UserError(f"{output} does not end in .csv, .json or .parquet", hint="name the format: --format csv")


def _write_series(client: Client, job: str, format_: SeriesFormat, output: Path | None) -> None:
    if output is None:
        if format_ == "parquet" and sys.stdout.isatty():
            raise UserError("a terminal cannot show Parquet", hint="write a file: --output metrics.parquet")
        client.metrics_file(job, format_, print_bytes)
        return
    # Only a complete file gets its name.
    partial = output.with_name(f".{output.name}.part")
    try:
        try:
            with partial.open("wb") as file:
                client.metrics_file(job, format_, file.write)
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as failure:
        raise Unavailable(
            f"{output} cannot be written: {failure.strerror or failure}",
            hint="free space, or choose another --output",
        ) from failure
    console.print(f"{output}  {bytes_text(output.stat().st_size)}")


def _follow(client: Client, job: JobRecord, *, after: int | None = None, as_json: bool) -> None:
    from share_compute_api.cli.submitter.following import follow

    follow(client, job, after=_beginning(client, job) if after is None else after, as_json=as_json)


def _wanted(client: Client, job: str, tail: int | None, since_s: float | None) -> tuple[int, int]:
    """Return the numbers of the events before the first and at the last one that ``--tail`` and ``--since`` select."""
    begin = None if since_s is None else client.health().time - timedelta(seconds=since_s)
    newest, last = 0, deque[int](maxlen=(tail or 0) + 1)
    for event in _events(client, job, newest):
        newest = event.seq
        if (begin is None or event.at >= begin) and (tail is not None or not last):
            last.append(event.seq)
    if not last:
        return newest, newest
    return last[0] - 1 if tail is None or len(last) <= tail else last[0], newest


def _print_events(client: Client, job: str, after: int, until: int | None, *, as_json: bool) -> None:
    """Print the events after one number up to another one; None: those that there are by now."""
    from share_compute_api.terminal.describe import event_line

    for event in _events(client, job, after):
        if until is not None and event.seq > until:
            return
        if as_json:
            print_json(event, compact=True)
        else:
            console.print(event_line(event), soft_wrap=True)


def _events(client: Client, job: str, after: int) -> Iterator[EventRecord]:
    """Yield the events of a job after a number, up to the first page that is not full."""
    while events := (page := client.events(job, after=after, limit=_PAGE)).events:
        yield from events
        if len(events) < _PAGE:  # a running job may report faster than lines are printed
            return
        after = page.next_after


def _beginning(client: Client, job: JobRecord) -> int:
    """Return the sequence number of the last event before the job's newest attempt; 0 for the first attempt."""
    if job.attempt == 1:
        return 0
    after = 0
    while events := (page := client.events(job.id, after=after, limit=_PAGE)).events:
        earlier = [event for event in events if (event.attempt or 0) < job.attempt]
        after = earlier[-1].seq if earlier else after
        if len(earlier) < len(events):
            break
        after = page.next_after
    return after


def _report(job: JobRecord, *, as_json: bool, compact: bool = False) -> None:
    if as_json:
        print_json(job, compact=compact)
    else:
        console.print(f"{job.id}  {state_text(job.state)}  {escape(translated(job.reason))}")
