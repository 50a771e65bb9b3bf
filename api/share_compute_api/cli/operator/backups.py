"""Commands for backups of the embedded database: ``backup``, ``restore``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from share_compute.quantities import bytes_text
from share_compute_api.terminal.options import Json, Yes, confirm
from share_compute_api.terminal.output import console, print_json

DataFolder = Annotated[Path | None, typer.Option(help="Where the server keeps its state.")]
DatabaseUrl = Annotated[
    str | None, typer.Option(help="URL of the database, if it is not in the data folder.")
]


def backup(
    file: Annotated[
        Path | None,
        typer.Argument(help="File to write; default: one in the folder backups of the data folder."),
    ] = None,
    data_folder: DataFolder = None,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Back up the database of this machine's server, even while the server runs; files of jobs are not included."""
    from share_compute.store.database.backups import FOLDER, back_up, embedded_file
    from share_compute.store.store import utc_now

    settings = _settings(data_folder, database_url)
    target = (file or settings.data_folder / FOLDER / f"{utc_now():%Y%m%dT%H%M%S}.db").absolute()
    size_bytes = back_up(embedded_file(settings.resolved_database_url), target)
    if as_json:
        print_json({"path": str(target), "size_bytes": size_bytes})
    else:
        console.print(f"{target}  {bytes_text(size_bytes)}", markup=False, soft_wrap=True)


def restore(
    file: Annotated[Path, typer.Argument(help="Backup file to restore.")],
    data_folder: DataFolder = None,
    database_url: DatabaseUrl = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Replace the database of this machine's server with a backup; the server must be stopped."""
    from share_compute.store.database import backups
    from share_compute.store.store import utc_now

    url = _settings(data_folder, database_url).resolved_database_url
    database = backups.embedded_file(url)
    backups.require_backup(file.absolute())
    confirm(f"Replace {database} with {file}? Changes after the backup are not in it.", yes=yes)
    replaced = backups.restore(file.absolute(), url, utc_now())
    if as_json:
        print_json({"path": str(database), "replaced": None if replaced is None else str(replaced)})
        return
    console.print(f"{database} is restored", markup=False, soft_wrap=True)
    if replaced is not None:
        console.print(f"the previous database is {replaced}", markup=False, soft_wrap=True)


def _settings(data_folder: Path | None, database_url: str | None) -> Any:
    from share_compute.settings import Settings

    given: dict[str, Any] = {"data_folder": data_folder, "database_url": database_url}
    return Settings(**{name: value for name, value in given.items() if value is not None})
