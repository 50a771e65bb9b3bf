"""``share-compute status``: shows an overview of the server, its machines and its jobs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.cells import set_cell_size
from rich.markup import escape

from share_compute.quantities import bytes_text
from share_compute_api.terminal.language import heading, translated
from share_compute_api.terminal.machines import served_names, work_of
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import (
    console,
    machine_state,
    number,
    print_json,
    print_table,
    since,
    speed,
    state_text,
)

_GONE = ("left", "lost")
_MOST_JOBS = 10
_SIGNS = {"error": ("red", "error"), "warning": ("yellow", "warn")}
"""Style and sign of each severity."""
_SIGN = 5
"""Width of the signs, in cells."""


def status(
    trials: Annotated[
        bool, typer.Option("--trials", help="List each trial of a sweep as a job of its own, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the server, its alerts, the present machines, the latest jobs and sweeps, and why jobs wait."""
    from share_compute_api.client.client import Client
    from share_compute_api.terminal.describe import progress
    from share_compute_api.terminal.sweeps import summary_of

    with Client() as client:
        found, machines = client.status(), client.contributors()
        jobs = client.jobs(trials=trials, limit=_MOST_JOBS).jobs
        alerts = client.alerts()
        queue = [job for job in client.queue() if trials or job.sweep_id is None]
        served = served_names(client, machines)
        sweeps = [summary_of(job, client.trials(job.id)) for job in jobs if job.kind == "sweep"]
    here = [machine for machine in machines if machine.state.value not in _GONE]
    if as_json:
        server = {"server": found, "alerts": alerts, "contributors": here}
        print_json({**server, "jobs": jobs, "sweeps": sweeps, "queue": queue})
        return
    place = f" in {escape(found.data_folder)}" if found.data_folder else ""
    console.print(f"[bold]{escape(found.url)}[/]  {escape(found.database)}{place}")
    roots = ", ".join(found.data_roots) or "none; share-compute upload sends files"
    console.print(f"[dim]jobs may name files below: {escape(roots)}[/]")
    for alert in alerts:
        style, sign = _SIGNS[alert.severity]
        console.print(f"[{style}]{set_cell_size(heading(sign), _SIGN)}[/] {escape(translated(alert.text))}")
        if alert.hint:
            console.print(f"      [dim]{escape(translated(alert.hint))}[/]", soft_wrap=True)
    console.print()
    rows = (
        (
            escape(machine.name),
            state_text(machine_state(machine.state.value, is_leased=machine.is_leased)),
            f"{machine.machine().whole.flops_per_s() / 1e9:.1f}" if machine.capacity else None,
            bytes_text(machine.limits["memory_bytes"]),
            work_of(machine, served),
            escape(machine.reason),
        )
        for machine in here
    )
    columns: tuple[str, ...] = ("machine", "state", "GFLOP/s", "memory", "work", "reason")
    print_table(columns, rows, empty="No machine is here. Let one in: share-compute invite")
    console.print()
    work = (
        (
            job.id,
            escape(job.name),
            state_text(job.state.value),
            progress(job),
            number(job.loss),
            speed(job.tokens_per_s, of_tokens=job.counts_tokens),
        )
        for job in jobs
    )
    print_table(("id", "name", "state", "done", "loss", "speed"), work, empty="No jobs yet.")
    if sweeps:
        console.print()
        trials_of = (
            (one.id, escape(one.name), one.running, one.waiting, one.ended, one.best_text) for one in sweeps
        )
        columns = ("sweep", "name", "running", "waiting", "ended", "best")
        print_table(columns, trials_of, empty="", right=columns[2:5])
    if not queue:
        return
    console.print()
    waiting = (
        (job.id, escape(job.name), since(job.waiting_since), escape(job.reason)) for job in queue[:_MOST_JOBS]
    )
    print_table(("waits", "name", "since", "reason"), waiting, empty="")
    if len(queue) > _MOST_JOBS:
        console.print(f"[dim]and {len(queue) - _MOST_JOBS} more jobs wait; --json has them all[/dim]")
