"""``share-compute demo``: runs a server, its machines and a training job, all on this machine."""

from __future__ import annotations

import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from share_compute.quantities import bytes_text, seconds_text
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import Terminal, print_json, rate, state_text
from share_compute_api.terminal.tables import WholeTable

if TYPE_CHECKING:
    from share_compute.store.records import ContributorRecord, JobRecord
    from share_compute_actors.machine.processes import ChildProcesses
    from share_compute_api.client.client import Client
    from share_compute_api.demonstration.cluster import LocalCluster

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_BAR_WIDTH = 60
_MACHINE_MEMORY = "1GiB"


def demo(
    contributors: Annotated[int, typer.Option(min=1, max=6, help="Machines that join.")] = 3,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Steps to train.")] = 150,
    end: Annotated[bool, typer.Option("--exit", help="End when done; else the server stays up.")] = False,
    keep_data: Annotated[bool, typer.Option("--keep-data", help="Keep the server's folder.")] = False,
    as_json: Json = False,
) -> None:
    """Train a small model over several contributors, all on this machine, and generate text with it."""
    from share_compute_api.demonstration.cluster import LocalCluster
    from share_compute_api.terminal.children import Interrupts

    console = Terminal(stderr=as_json)
    try:
        with (
            Interrupts() as interrupts,
            _folders(keep_data) as (children, folder),
            ExitStack() as stack,
        ):
            interrupts.takes_along(children)
            texts, here = folder / "texts", Path.cwd()
            texts.mkdir()
            # The working folder is also a data root, so that the user can submit jobs with files there.
            roots = [texts] if folder.is_relative_to(here) else [texts, here]
            cluster = LocalCluster(children, folder / "server", roots)
            stack.callback(cluster.close)
            stack.callback(console.print, "[dim]ending what the demonstration started[/]")
            stack.callback(interrupts.begin_stopping)
            result = _run(cluster, folder, contributors, steps, console)
            if as_json:
                print_json(result, compact=True)
            if not end:
                console.print(
                    f"\nThe server stays up: [bold]{escape(cluster.sign_in_link())}[/]\n"
                    "So that commands and Python in another terminal find it:\n"
                    f"  export SHARE_COMPUTE_DATA_FOLDER={escape(shlex.quote(str(cluster.data_folder)))}\n"
                    "Ctrl-C ends it.",
                    soft_wrap=True,
                )
                _wait_for_ever()
    except KeyboardInterrupt:
        console.print("ended")
        sys.exit(130 if end else 0)


def _run(
    cluster: LocalCluster, folder: Path, contributors: int, steps: int, console: Terminal
) -> dict[str, Any]:
    from share_compute_api.demonstration.corpus import gather_corpus
    from share_compute_api.demonstration.job import sample, write_job

    begin = time.monotonic()
    with console.status("starting a server"):
        client = cluster.start()
    with client:
        console.print(f"[bold]Server[/]  {escape(cluster.url)}")
        for number in range(1, contributors + 1):
            cluster.join(client, f"machine-{number}", memory=_MACHINE_MEMORY)
        with Live(console=console, refresh_per_second=4) as live:
            cluster.wait_until_ready(client, lambda here: live.update(_machines(here)))
        if not console.is_terminal:  # without a terminal, Live does not end its last line
            console.line()
        corpus = folder / "texts" / "corpus.txt"
        console.print(f"[bold]Text[/]    {bytes_text(gather_corpus(corpus))} of Python's documentation")
        file = write_job(folder, corpus, stages=contributors, steps=steps)
        job = client.submit(file.read_text())
        console.print(f"[bold]Job[/]     {job.id}")
        losses, seconds = _follow(client, job, steps, console)
        job = client.job(job.id)
        _require_success(job)
        predicted_s, error = prediction_error(job, seconds)
        if error is not None:
            measured = seconds_text(statistics.median(seconds))
            console.print(
                f"[bold]A step[/]  predicted {seconds_text(predicted_s)}, measured {measured} ({error:+.0%})"
            )
        artifact = client.artifacts(job.id)[0]
        # The server's copy is deleted at the end, unless the user chose --keep-data.
        kept = Path(tempfile.mkdtemp(prefix="share-compute-demo-"))
        model_folder = client.download(job.id, artifact.name, kept)
        with console.status("loading the result with transformers"):
            samples = sample(model_folder)
    console.print(
        f"[bold]Result[/]  {escape(str(model_folder))}, {bytes_text(artifact.size_bytes)}; it writes:"
    )
    for prompt, continuation in samples:
        written = re.sub(r"\s+", " ", continuation)
        console.print(Text.assemble("  ", (prompt, "bold"), (written, "italic")))
    return {
        "contributors": contributors,
        "plan": job.plan.model_dump(mode="json") if job.plan else None,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "tokens_per_s": job.tokens_per_s,
        "prediction_error": error,
        "artifact": str(model_folder),
        "samples": [prompt + continuation for prompt, continuation in samples],
        "seconds": round(time.monotonic() - begin, 1),
    }


def prediction_error(job: JobRecord, seconds: Sequence[float]) -> tuple[float, float | None]:
    """Return the predicted step time in seconds, and the ratio (median measured step time / predicted step time) - 1.

    Return (0, None) if there is no prediction, or if no step was measured.

    Args:
        job: the finished job; its last plan has the prediction.
        seconds: measured duration of each step, in seconds.
    """
    if job.plan is None or job.plan.prediction is None or not seconds:
        return 0.0, None
    predicted_s = job.plan.prediction.step_s
    return predicted_s, statistics.median(seconds) / predicted_s - 1


def _follow(client: Client, job: JobRecord, steps: int, console: Terminal) -> tuple[list[float], list[float]]:
    """Show a job's steps until the job is finished; return the loss and the duration in seconds of each step."""
    losses: list[float] = []
    seconds: list[float] = []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=steps, figures="preparing")
        for event in client.follow(job.id):
            if event.kind == "planned":
                progress.console.print(_placement(event.data["plan"]))
            elif event.kind == "step":
                losses.append(event.data["loss"])
                seconds.append(event.data["seconds"])
                figures = f"loss {losses[-1]:.3f}  {rate(event.data['tokens_per_s'])} tokens/s"
                progress.update(task, completed=event.data["step"], figures=figures)
    return losses, seconds


def _require_success(job: JobRecord) -> None:
    from share_compute.errors import ShareComputeError
    from share_compute.lifecycle.states import JobState

    if job.state is not JobState.succeeded:
        hint = (job.error or {}).get("hint") or "run share-compute doctor, then try again"
        raise ShareComputeError(f"the job {job.state.value}: {job.reason}", hint=hint, job=job.id)


def _machines(machines: list[ContributorRecord]) -> WholeTable:
    return WholeTable(
        ("machine", "state", "GFLOP/s", "lent", "reason"),
        (
            (
                escape(machine.name),
                state_text(machine.state.value),
                f"{machine.machine().whole.flops_per_s() / 1e9:.0f}" if machine.capacity else None,
                bytes_text(machine.limits["memory_bytes"]),
                escape(machine.reason),
            )
            for machine in machines
        ),
    )


def _placement(plan: dict[str, Any]) -> Text:
    """Draw the layers as one bar, coloured by stage, with a legend of the stages."""
    from share_compute.planning.plan import layer_span

    bar, legend = Text("  "), Text()
    for index, stage in enumerate(plan["stages"]):
        colour = _COLOURS[index % len(_COLOURS)]
        layers = stage["stop"] - stage["start"]
        names = " + ".join(member["name"] for member in stage["members"])
        bar.append("█" * round(_BAR_WIDTH * layers / plan["num_layers"]), style=colour)
        legend.append(f"\n  {layer_span(stage['start'], stage['stop'])}  {names}", style=colour)
        legend.append(f"  {stage['members'][0]['reason']}", style="dim")
    return bar.append_text(legend)


@contextmanager
def _folders(keep_data: bool) -> Iterator[tuple[ChildProcesses, Path]]:
    from share_compute_actors.machine.run_folders import close_run_folder, open_run_folder, sweep

    sweep()
    children = open_run_folder(f"demo {os.getpid()}")
    try:
        yield children, Path(tempfile.mkdtemp(prefix="share-compute-demo-")) if keep_data else children.folder
    finally:
        close_run_folder(children)
        sweep()  # removes files of child processes that had to be killed


def _wait_for_ever() -> None:
    while True:
        time.sleep(3600)
