"""``share-compute chaos``: injects faults into members of a running job, and reports how the job recovers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from secrets import randbelow
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from share_compute.errors import Conflict, NotFound, UserError, VerificationFailed
from share_compute.lifecycle.states import JobState
from share_compute_api.terminal.completion import complete_job
from share_compute_api.terminal.options import Json, duration_s
from share_compute_api.terminal.output import Terminal, duration, print_json, print_table, state_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from share_compute.store.records import EventRecord, JobRecord
    from share_compute_api.client.client import Client
    from share_compute_api.client.storm import Gust, Hit, HitReport, Restart, StormKind, StormReport

_POLL_S = 0.5
_RECOVERY_S = 60.0
"""Time limit for the job's recovery after the storm, in seconds."""
_FAILED = 10


def chaos(
    job: Annotated[
        str, typer.Option("--job", metavar="JOB", help="Id of the job.", autocompletion=complete_job)
    ],
    mtbf: Annotated[str, typer.Option(help="Mean time between two failures, e.g. 20s or 2m.")] = "20s",
    minutes: Annotated[
        float, typer.Option(min=0.05, help="Duration in minutes; the storm ends earlier if the job ends.")
    ] = 10.0,
    kinds: Annotated[
        str, typer.Option(help="Failures, separated by commas: kill, stop, leave; leave removes machines.")
    ] = "kill,stop",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the storm; equal seeds give equal storms.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Job without failures that must have the same losses.",
            autocompletion=complete_job,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Inject failures into members of a running job at random times, and report how the job recovers.

    The server must allow failures: share-compute up --allow-failures, or share-compute demo.
    """
    from share_compute_api.client.client import Client
    from share_compute_api.client.storm import gusts

    seconds, mtbf_s = 60.0 * minutes, duration_s(mtbf, "--mtbf", least_s=0.1)
    seed = randbelow(10**6) if seed is None else seed
    coming = list(gusts(seed, mtbf_s, seconds, _kinds(kinds)))
    console = Terminal(stderr=as_json)
    with Client() as client:
        others = None if against is None else _losses(client, against)
        storm = _Storm(client, job, console)
        storm.rage(coming, seconds)
        report = storm.report(seed, mtbf_s, None if against is None else (against, others or {}))
    if as_json:
        print_json(report, compact=True)
    else:
        _show(report, console)
    _conclude(report)


class _Storm:
    """Injects a random schedule of failures (a storm) into one job.

    Args:
        client: client of the server.
        job_id: id of the job.
        console: console for the progress.
    """

    def __init__(self, client: Client, job_id: str, console: Terminal) -> None:
        self._client = client
        self._job_id = job_id
        self._console = console
        self._hits: list[Hit] = []
        self._missed = 0
        self._seconds = 0.0
        self._after = 0
        """Sequence number of the job's last event before the storm."""
        self._attempt = 1
        self._step = 0
        """Last step that was committed before the storm."""

    def rage(self, coming: Sequence[Gust], seconds: float) -> None:
        """Wait until the job runs, then inject the failures as scheduled.

        The injection stops after ``seconds``, when the job ends, or at Ctrl-C.

        Raises:
            Conflict: the job is finished already, or does not run within ``seconds``.
        """
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
        is_live = self._console.is_terminal
        with Progress(
            *columns, TimeRemainingColumn(), console=self._console, disable=not is_live
        ) as progress:
            task = progress.add_task("waiting for the job to run", total=seconds, figures="")
            try:
                self._wait_until_it_runs(seconds)
                progress.update(task, description="storm")
                self._rage(coming, seconds, progress, task)
            except KeyboardInterrupt:
                self._console.print("the storm is stopped")

    def _wait_until_it_runs(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while (job := self._client.job(self._job_id)).state is not JobState.running or not job.step:
            if job.state.is_final:
                raise Conflict(
                    f"the job has ended ({job.state.value})",
                    hint="submit a longer job, and start the storm at once",
                    job=self._job_id,
                )
            if time.monotonic() > deadline_s:
                raise Conflict(
                    f"the job did not begin to run: {job.reason or job.state.value}",
                    hint=f"see why it waits: share-compute show {self._job_id}",
                    job=self._job_id,
                )
            time.sleep(_POLL_S)
        while (page := self._client.events(self._job_id, after=self._after, limit=5000)).events:
            self._after = page.next_after
            for event in page.events:
                self._attempt = event.attempt or self._attempt
                self._step = int(event.data["step"]) if event.kind == "step" else self._step

    def _rage(self, coming: Sequence[Gust], seconds: float, progress: Progress, task: TaskID) -> None:
        start = time.monotonic()
        waiting = list(coming)
        while True:
            now_s = time.monotonic() - start
            self._seconds = min(now_s, seconds)
            job = self._client.job(self._job_id)
            if job.state.is_final:
                return
            # Inject failures even if they are late, so that a slow server gets the same storm.
            while waiting and waiting[0].after_s <= now_s:
                self._strike(job, waiting.pop(0))
            if now_s >= seconds:
                return
            figures = f"{len(self._hits)} failures  step {job.step}/{job.total_steps}"
            progress.update(task, completed=now_s, figures=figures)
            next_s = waiting[0].after_s if waiting else seconds
            time.sleep(min(_POLL_S, max(0.0, min(next_s, seconds) - now_s)))

    def _strike(self, job: JobRecord, gust: Gust) -> None:
        from share_compute_api.client.storm import Hit

        stages = job.plan.stages if job.plan else ()
        names = {member.contributor_id: member.name for stage in stages for member in stage.members}
        if not names:
            self._missed += 1
            return
        victim = gust.victim(list(names))
        try:
            at = self._inject(victim, gust)
        except (Conflict, NotFound):  # the member has ended, or the job is restarting
            self._missed += 1
            return
        hit = Hit(
            kind=gust.kind, contributor_id=victim, machine=names[victim], at=at, duration_s=gust.duration_s
        )
        self._hits.append(hit)
        self._console.print(f"{_said(hit)} at step {job.step}", soft_wrap=True)

    def _inject(self, victim: str, gust: Gust) -> datetime:
        if gust.kind == "leave":
            removed_at = self._client.remove_contributor(victim, keep_token=True).removed_at
            assert removed_at is not None
            return removed_at
        lasts_s = gust.duration_s or 0.0
        return self._client.make_failure(self._job_id, gust.kind, victim, duration_s=lasts_s).at

    def report(
        self, seed: int, mtbf_s: float, against: tuple[str, Mapping[int, float]] | None
    ) -> StormReport:
        """Wait until the job has recovered from all failures or is finished, and return the report.

        The wait lasts `_RECOVERY_S` seconds at most.
        """
        from share_compute_api.client.storm import StormReport, assess, compare, pace, restarts

        deadline_s = time.monotonic() + _RECOVERY_S
        with self._console.status("waiting for the next step"):
            while True:
                job, events = self._client.job(self._job_id), self._events()
                hits = assess(self._hits, events, self._step)
                is_calm = all(hit.recovered_s is not None for hit in hits)
                if is_calm or job.state.is_final or time.monotonic() > deadline_s:
                    break
                time.sleep(_POLL_S)
        steps, step_s, longest_stall_s = pace(events)
        begun = restarts(events, self._attempt, self._step)
        losses = _losses(self._client, self._job_id) if against else {}
        return StormReport(
            job_id=self._job_id,
            state=job.state,
            seed=seed,
            mtbf_s=mtbf_s,
            seconds=self._seconds,
            hits=hits,
            missed=self._missed,
            steps=steps,
            steps_again=sum(restart.steps_lost for restart in begun),
            restarts=begun,
            step_s=step_s,
            longest_stall_s=longest_stall_s,
            against=compare(against[0], losses, against[1]) if against else None,
        )

    def _events(self) -> list[EventRecord]:
        events: list[EventRecord] = []
        after = self._after
        while (page := self._client.events(self._job_id, after=after, limit=5000)).events:
            events += page.events
            after = page.next_after
        return events


def _losses(client: Client, job_id: str) -> dict[int, float]:
    return {record.step: record.data["loss"] for record in client.metrics(job_id) if record.split == "train"}


def _kinds(text: str) -> list[StormKind]:
    from share_compute_api.client.storm import STORM_KINDS

    wanted = {part.strip() for part in text.split(",") if part.strip()}
    if unknown := wanted.difference(STORM_KINDS):
        raise UserError(
            f"--kinds {', '.join(sorted(unknown))} is not known", hint=f"choose from {', '.join(STORM_KINDS)}"
        )
    return [kind for kind in STORM_KINDS if kind in wanted]


def _reaction(hit: HitReport) -> str:
    if hit.restarted_from is not None:
        return f"restarted from step {hit.restarted_from}"
    return "continued without it" if hit.was_noticed else "waited for it"


def _restarted(restart: Restart) -> str:
    if restart.steps_lost:
        return (
            f"attempt {restart.attempt} restarted from step {restart.step}: {restart.steps_lost} steps lost"
        )
    return f"attempt {restart.attempt} continued from step {restart.step}: no step lost"


def _said(hit: Hit) -> str:
    for_s = f" for {hit.duration_s:.1f} s" if hit.duration_s else ""
    return f"{hit.kind} {escape(hit.machine)}{for_s}"


def _show(report: StormReport, console: Terminal) -> None:
    rows = (
        (
            _said(hit),
            hit.step,
            _reaction(hit),
            None if hit.recovered_s is None else f"{hit.recovered_s:.2f} s",
            hit.recomputed,
        )
        for hit in report.hits
    )
    columns = ("failure", "after step", "the job", "until the next step", "recomputed")
    print_table(columns, rows, empty="Nothing failed.")
    console.print(f"[bold]job[/]     {escape(report.job_id)}  {state_text(report.state)}")
    again = f", {report.steps_again} lost and computed again" if report.steps_again else ", none lost"
    console.print(f"[bold]steps[/]   {report.steps} in {duration(report.seconds)}{again}")
    for restart in report.restarts:
        console.print(f"[bold]restart[/] {_restarted(restart)}")
    if report.step_s is not None and report.longest_stall_s is not None:
        console.print(
            f"[bold]pace[/]    {report.step_s:.2f} s a step; the longest took {report.longest_stall_s:.2f} s"
        )
    if report.against is not None:
        other = report.against
        same = "equal" if other.first_difference is None else f"different from step {other.first_difference}"
        console.print(f"[bold]losses[/]  of {other.steps} steps {same}, compared with {escape(other.job_id)}")
    console.print(f"[dim]the same storm again: --seed {report.seed}[/]")


def _conclude(report: StormReport) -> None:
    """Raise if the job failed or did not recover, or if its losses differ from those of the job of ``--against``.

    Raises:
        typer.Exit: the job failed.
        VerificationFailed: the losses differ, or the unfinished job committed no step after a failure.
    """
    if report.state is JobState.failed:
        raise typer.Exit(_FAILED)
    if report.against is not None and report.against.first_difference is not None:
        raise VerificationFailed(
            f"losses differ from those of {report.against.job_id} from step {report.against.first_difference} on",
            hint="check that both jobs are equal, on machines of one kind; if so, report this with the seed",
            job=report.job_id,
        )
    if report.unrecovered and not report.state.is_final:
        hit = report.unrecovered[0]
        raise VerificationFailed(
            f"after {_said(hit)} no step was committed in {_RECOVERY_S:.0f} s",
            hint=f"share-compute logs {report.job_id}",
            job=report.job_id,
        )
