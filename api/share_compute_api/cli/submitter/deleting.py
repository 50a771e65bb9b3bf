"""Commands that delete: ``delete``, ``prune``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from share_compute.errors import Conflict
from share_compute.quantities import bytes_text
from share_compute_api.terminal.completion import complete_job
from share_compute_api.terminal.options import Json, Yes, confirm
from share_compute_api.terminal.output import console, print_items, print_table

_KEEPS_ALL = (
    "No retention time is set, so all data is kept. Start the server with a number of days in "
    "SHARE_COMPUTE_KEEP_JOBS_DAYS, SHARE_COMPUTE_KEEP_ARTIFACTS_DAYS, SHARE_COMPUTE_KEEP_CHECKPOINTS_DAYS, "
    "SHARE_COMPUTE_KEEP_METRICS_DAYS or SHARE_COMPUTE_KEEP_EVENTS_DAYS; `share-compute config keep` explains them."
)


def delete(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB", help="Ids of finished jobs.", autocompletion=complete_job),
    ],
    cancel: Annotated[
        bool,
        typer.Option("--cancel", help="Cancel unfinished jobs, and delete each one when it has ended."),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete jobs with their events, metrics, checkpoints and artifacts. Uploads stay."""
    from share_compute_api.client.client import Client

    with Client() as client:
        found = [client.job(job) for job in jobs]
        for job in found:
            if not job.state.is_final and not cancel:
                raise Conflict(
                    f"job {job.id} is {job.state}; nothing was deleted",
                    hint="wait for it, or delete it with --cancel",
                    job=job.id,
                )
        named = ", ".join(f"{job.id} ({job.name})" for job in found)
        confirm(f"Delete {named} with all checkpoints and artifacts?", yes=yes)
        gone = [client.delete_job(job.id, cancel=cancel) for job in found]
    if as_json:
        print_items(gone)
        return
    for one in gone:
        console.print(f"{one.id}  {'deleted' if one.is_deleted else 'is deleted as soon as it has stopped'}")


def prune(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the data to delete, and delete nothing.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete data past its retention time (SHARE_COMPUTE_KEEP_..._DAYS) now; the server also does so every hour."""
    from share_compute_api.client.client import Client

    with Client() as client:
        report = client.prune(dry_run=True)
        if not dry_run and report.pruned:
            confirm(f"Delete {len(report.pruned)} things, {bytes_text(report.size_bytes)} of files?", yes=yes)
            report = client.prune(dry_run=False)
    if as_json:
        print_items(report.pruned, dry_run=report.dry_run, size_bytes=report.size_bytes, keep=report.keep)
        return
    rows = (
        (one.kind, one.job_id, escape(one.name or ""), one.rows or None, bytes_text(one.size_bytes))
        for one in report.pruned
    )
    times = ", ".join(f"{name}={days:g}" for name, days in report.keep.items())
    empty = f"No data is past its retention time: {times}." if times else _KEEPS_ALL
    print_table(("what", "job", "name", "rows", "files"), rows, empty=empty)
    if report.pruned:
        size = bytes_text(report.size_bytes)
        console.print(f"{size} of files would be deleted" if report.dry_run else f"{size} of files deleted")
