"""Commands for finished results: ``artifacts list``, ``artifacts get``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from share_compute.planning.words import bytes_text
from share_compute_api.cli.options import Job, Json
from share_compute_api.cli.output import console, print_json, print_table, since

app = typer.Typer(no_args_is_help=True, help="List and download the results of jobs.")


@app.command("list")
def list_artifacts(job: Job, as_json: Json = False) -> None:
    """List a job's finished results."""
    from share_compute_api.client import Client

    with Client() as client:
        found = client.artifacts(job)
    if as_json:
        print_json(found)
        return
    rows = ((escape(one.name), bytes_text(one.size_bytes), since(one.created_at)) for one in found)
    print_table(("name", "size", "made"), rows, empty="Nothing is finished yet.")


@app.command("get")
def get_artifact(
    job: Job,
    name: Annotated[str | None, typer.Argument(help="Name of the result; default: all of them.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to download into.")] = Path(),
    as_json: Json = False,
) -> None:
    """Download results. One that was broken off goes on where it stopped."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from share_compute.errors import NotFound
    from share_compute_api.client import Client

    with Client() as client:
        found = [client.artifact(job, name).artifact] if name else client.artifacts(job)
        if not found:
            raise NotFound(
                f"job {job} has no result yet", mend=f"wait for it: share-compute logs -f {job}", job=job
            )
        paths = []
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, disable=as_json or not console.is_terminal) as progress:
            for artifact in found:
                task = progress.add_task(escape(artifact.name), total=artifact.size_bytes)
                advance = partial(progress.advance, task)
                paths.append(client.download(job, artifact.name, output, progress=advance))
    if as_json:
        print_json({"paths": [str(path.resolve()) for path in paths]})
    else:
        for path in paths:
            console.print(str(path), markup=False, soft_wrap=True)
