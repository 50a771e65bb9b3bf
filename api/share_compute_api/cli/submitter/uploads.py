"""Commands for data and models on the server: ``upload``, ``uploads list``, ``uploads remove``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from share_compute.quantities import bytes_text
from share_compute_api.schemas.choices import UploadKind
from share_compute_api.terminal.options import Json
from share_compute_api.terminal.output import console, print_items, print_json, print_table, since, state_text
from share_compute_api.terminal.usage import CommandGroup

app = CommandGroup(no_args_is_help=True, help="List and remove data and models that were sent to the server.")


def upload(
    path: Annotated[Path, typer.Argument(help="File or folder to send.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the upload; default: the path's own name.")
    ] = None,
    kind: Annotated[
        UploadKind | None, typer.Option(help="Kind of the upload; detected if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send data, or the folder of a model or tokenizer, to the server; job files refer to it as upload:ID."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from share_compute_api.client.client import Client
    from share_compute_api.client.sending import files_below

    total = sum(file.stat().st_size for _, file in files_below(path))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        Client() as client,
        Progress(*columns, console=console, disable=as_json or not console.is_terminal) as progress,
    ):
        task = progress.add_task(escape(name or path.resolve().name), total=total)
        sent = client.upload(
            path,
            name=name,
            kind=kind,
            progress=partial(progress.advance, task),
        )
    if as_json:
        print_json(sent)
        return
    # Job files refer to each file of a data set, but to the whole folder of a model or tokenizer.
    for inside in (f"/{file.path}" for file in sent.files) if sent.kind == "data" else ("",):
        console.print(f"upload:{sent.id}{inside}", markup=False, soft_wrap=True)


@app.command("list")
def list_uploads(as_json: Json = False) -> None:
    """List all uploads, newest first."""
    from share_compute_api.client.client import Client

    with Client() as client:
        found = client.uploads()
    if as_json:
        print_items(found.uploads, used_bytes=found.used_bytes, limit_bytes=found.limit_bytes)
        return
    rows = (
        (
            one.id,
            escape(one.name),
            one.kind,
            state_text(one.state),
            len(one.files),
            bytes_text(one.size_bytes),
            since(one.created_at),
        )
        for one in found.uploads
    )
    print_table(("id", "name", "kind", "state", "files", "size", "made"), rows, empty="No uploads yet.")
    console.print(f"{bytes_text(found.used_bytes)} of {bytes_text(found.limit_bytes)} are used.")


@app.command("remove")
def remove_upload(
    upload_id: Annotated[str, typer.Argument(metavar="UPLOAD", help="Id of the upload.")],
    as_json: Json = False,
) -> None:
    """Remove an upload that no unfinished job and no deployment uses."""
    from share_compute_api.client.client import Client

    with Client() as client:
        gone = client.remove_upload(upload_id)
    if as_json:
        print_json(gone)
    else:
        console.print(f"{gone.id}  removed")
