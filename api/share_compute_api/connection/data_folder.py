"""The data folder of a server. One server uses it at a time, and clients on this machine find the server through it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from share_compute.errors import Conflict, Unavailable
from share_compute.files.durable import write_private
from share_compute.scopes import Scope
from share_compute_api.connection.discovery import CREDENTIALS_FILE, SERVER_FILE, CredentialsFile, ServerFile

if TYPE_CHECKING:
    from share_compute.store import Store


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder inside the block; the system also releases the lock when the process is killed.

    Raises:
        Conflict: another server holds the lock.
        Unavailable: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("w")
    except OSError as failure:
        raise Unavailable(
            f"the data folder {folder} cannot be used: {failure.strerror}",
            hint="choose another one with --data-folder",
        ) from failure
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            raise Conflict(
                f"a server uses the data folder {folder} already ({_whose(folder)})",
                hint="use that one, stop it, or choose another folder with --data-folder",
            ) from failure
        yield


def write_server_file(folder: Path, url: str, fingerprint: str | None = None) -> Path:
    """Write `server.json`, by which clients on this machine find the server; return the file's path.

    The caller must delete the file when the server ends.
    """
    file = folder / SERVER_FILE
    facts = {
        "url": url,
        "fingerprint": fingerprint,
        "pid": os.getpid(),
        "started_at": datetime.now(UTC).isoformat(),
    }
    write_private(file, json.dumps(facts))
    return file


def first_api_key(folder: Path, store: Store) -> str:
    """Return the operator's API key from the folder.

    If the key is missing or not a valid admin key, create a new one and write it to the folder.
    """
    key = written_api_key(folder)
    record = None if key is None else store.keys.verify(key)
    if key is not None and record is not None and record.may(Scope.admin):
        return key
    _, key = store.keys.create("operator", (Scope.admin,))
    write_private(folder / CREDENTIALS_FILE, json.dumps({"api_key": key}))
    return key


def written_api_key(folder: Path) -> str | None:
    """Return the operator's API key from the file in the folder; None if the file is missing or damaged."""
    try:
        text = (folder / CREDENTIALS_FILE).read_bytes()
        return CredentialsFile.model_validate_json(text).api_key
    except (FileNotFoundError, ValidationError):  # a damaged file is replaced, like a missing one
        return None


def _whose(folder: Path) -> str:
    try:
        server = ServerFile.model_validate_json((folder / SERVER_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError):
        return "it is just starting"
    return f"process {server.pid}, {server.url}"
