"""Commands for results and checkpoints: ``artifacts``, ``export`` and ``push``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from share_compute.quantities import bytes_text
from share_compute_api.terminal.options import Job, Json, Yes, confirm
from share_compute_api.terminal.output import console, print_items, print_json, print_table, since
from share_compute_api.terminal.usage import CommandGroup

if TYPE_CHECKING:
    from share_compute.store import ArtifactRecord
    from share_compute_api.client.client import Client

app = CommandGroup(no_args_is_help=True, help="List, show, download and delete the results of jobs.")


@app.command("list")
def list_artifacts(job: Job, as_json: Json = False) -> None:
    """List a job's finished results."""
    from share_compute_api.client.client import Client

    with Client() as client:
        found = client.artifacts(job)
    if as_json:
        print_items(found)
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
    """Download the results of a job. An interrupted download continues where it stopped."""
    from share_compute.errors import NotFound
    from share_compute_api.client.client import Client

    with Client() as client:
        found = [client.artifact(job, name).artifact] if name else client.artifacts(job)
        if not found:
            raise NotFound(
                f"job {job} has no result yet", hint=f"wait for it: share-compute logs -f {job}", job=job
            )
        paths = [_download(client, artifact, output, artifact.name, as_json=as_json) for artifact in found]
    if as_json:
        print_items({"path": str(path.resolve())} for path in paths)
    else:
        for path in paths:
            console.print(str(path), markup=False, soft_wrap=True)


@app.command("layout")
def show_layout(
    job: Job,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of the result; default: model, or the newest checkpoint if there is no result."
        ),
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="List each weight.")] = False,
    match: Annotated[
        str | None,
        typer.Option("--match", metavar="GLOB", help="List the weights with such names, e.g. '*.q_proj.*'."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show in which file each weight is, and which machines trained it.

    The stages and machines are those of the job's last plan.
    """
    from share_compute_api.client.client import Client
    from share_compute_api.schemas.layout import MOST_LISTED
    from share_compute_api.terminal.layout import layout_items, print_layers, print_weights

    lists_weights = weights or match is not None
    pattern, limit = (match or "*", MOST_LISTED) if lists_weights else (None, None)
    with Client() as client:
        source = _newest(client, job) if name is None else name
        layout = client.layout(job, source, pattern, limit)
    if as_json:
        items = layout_items(layout, lists_weights=lists_weights)
        print_items(items, source=source, num_layers=layout.num_layers, matched=layout.matched)
        return
    if isinstance(source, int):
        console.print(f"The checkpoint of step {source}:", style="dim")
    if lists_weights:
        print_weights(layout)
    else:
        print_layers(layout)


@app.command("delete")
def delete_artifact(
    job: Job,
    name: Annotated[str, typer.Argument(help="Name of the result.")],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete one result of a job."""
    from share_compute_api.client.client import Client

    confirm(f"Delete {name} of {job}?", yes=yes)
    with Client() as client:
        gone = client.delete_artifact(job, name)
    if as_json:
        print_json(gone)
    else:
        console.print(f"{gone.id}  deleted", markup=False)


def export(
    job: Job,
    folder: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    step: Annotated[
        int | None, typer.Option("--step", help="Step of the checkpoint; default: the newest.", min=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a checkpoint as a Hugging Face folder, also while the job runs."""
    from share_compute.errors import Conflict, NotFound
    from share_compute_api.client.client import Client

    folder = folder.resolve()
    if folder.exists():
        raise Conflict(f"{folder} exists already", hint="remove it, or choose another folder")
    with Client() as client:
        steps = [checkpoint.step for checkpoint in client.checkpoints(job)]
        if not steps:
            raise NotFound(
                f"job {job} has no checkpoint yet",
                hint="set training.checkpoint_every, or wait for the job's end",
                job=job,
            )
        artifact = client.export(job, steps[-1] if step is None else step)
        _download(client, artifact, folder.parent, folder.name, as_json=as_json)
    if as_json:
        print_json({"path": str(folder), "artifact": artifact.name})
    else:
        console.print(str(folder), markup=False, soft_wrap=True)


def push(
    job: Job,
    repository: Annotated[
        str, typer.Argument(metavar="REPO", help="Repository on the Hugging Face Hub: OWNER/NAME, or NAME.")
    ],
    name: Annotated[str, typer.Option("--artifact", help="Name of the result.")] = "model",
    public: Annotated[bool, typer.Option("--public", help="Let everybody see the repository.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch of the repository; default: main.", show_default=False)
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Name of the base model on the Hub, for adapters.", show_default=False)
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Message of the commit.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Send a result with its model card to the Hugging Face Hub. A new repository is private.

    The token is that of `hf auth login`, or the one in HF_TOKEN. It stays on this machine.
    """
    from tempfile import TemporaryDirectory

    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars

    from share_compute_api.client.client import Client
    from share_compute_api.client.pushing import push as push_folder
    from share_compute_api.client.pushing import without_foreign_paths

    if (as_json or not console.is_terminal) and not are_progress_bars_disabled():
        disable_progress_bars()
    with Client() as client, TemporaryDirectory(prefix="share-compute-push-") as place:
        artifact = client.artifact(job, name).artifact
        folder = _download(client, artifact, Path(place), "result", as_json=as_json)
        without_foreign_paths(folder, base_model)
        title = message or f"Add {name} of {job}"
        pushed = push_folder(folder, repository, title, is_public=public, revision=revision)
    if as_json:
        print_json(asdict(pushed))
    else:
        seen = "private" if pushed.is_private else "public"
        console.print(f"{pushed.url}  {seen}  {pushed.commit}", markup=False, soft_wrap=True)


def _newest(client: Client, job: str) -> str | int:
    """Return the name of a job's model; the step of its newest checkpoint if it has no model yet."""
    from share_compute.errors import NotFound

    if any(artifact.name == "model" for artifact in client.artifacts(job)):
        return "model"
    checkpoints = client.checkpoints(job)
    if not checkpoints:
        raise NotFound(
            f"job {job} has no model and no checkpoint yet",
            hint=f"wait for one: share-compute logs -f {job}",
            job=job,
        )
    return checkpoints[-1].step


def _download(client: Client, artifact: ArtifactRecord, folder: Path, name: str, *, as_json: bool) -> Path:
    """Download a result to ``folder/name`` with a progress bar; return the path."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=as_json or not console.is_terminal) as progress:
        task = progress.add_task(escape(artifact.name), total=artifact.size_bytes)
        advance = partial(progress.advance, task)
        return client.download(artifact.job_id, artifact.name, folder, called=name, progress=advance)
