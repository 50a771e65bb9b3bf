"""Persistent identity of a machine: the stored key with which it can rejoin a server without an invite.

Each pair of server and machine name has one file in the folder `machines` of the data folder, readable by its owner
only. A running agent locks a second file in the same folder. Without the lock, a second agent with the same identity
would replace the Ray node of the first, because the server knows one node for each identity.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from share_compute.errors import Conflict, Unavailable
from share_compute.files.durable import write_private

Model = TypeVar("Model", bound=BaseModel)
_FOLDER = "machines"


class AgentIdentity(BaseModel):
    """Stored facts with which a machine rejoins a server."""

    url: str | None = None
    """URL of the server; None in files of older releases."""
    contributor_id: str
    key: str = Field(repr=False)
    fingerprint: str | None = None
    """Fingerprint of the server's key; None to verify the certificate with public authorities."""
    invite_digest: str | None = None
    """SHA-256 of the invite that the machine joined with; None if it joined with another device's key."""

    def came_with(self, invite: str) -> bool:
        """Return whether this machine joined with this invite."""
        return self.invite_digest == digest_of(invite)


def digest_of(invite: str) -> str:
    """Return the SHA-256 of an invite, in hexadecimal, as an identity stores it."""
    return hashlib.sha256(invite.encode()).hexdigest()


class Identities:
    """Stored identities of this machine, one for each server and machine name.

    Args:
        folder: the data folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER

    def find(self, url: str, name: str) -> AgentIdentity | None:
        """Return the identity for a server; None if this machine has not joined the server under this name.

        Raises:
            Unavailable: the file of the identity cannot be read.
        """
        return _read(self._file(url, name))

    def of_host(self, url: str, name: str) -> AgentIdentity | None:
        """Return an identity of this host for a server: one stored under the host's name, else under a device's name.

        Return None if neither is stored.

        Raises:
            Unavailable: a file cannot be read.
        """
        names = [name, *(one for one in self.names(url) if one.startswith(f"{name}."))]
        return next(filter(None, (self.find(url, one) for one in names)), None)

    def names(self, url: str) -> list[str]:
        """Return the names under which this machine joined a server."""
        end = f"-{_server(url)}.json"
        return sorted(file.name.removesuffix(end) for file in self._folder.glob(f"*{end}"))

    def urls(self) -> list[str]:
        """Return the URLs of the servers that this machine joined, without those of files that cannot be read."""
        found: list[AgentIdentity | None] = []
        for file in sorted(self._folder.glob("*.json")):
            with suppress(Unavailable):
                found.append(_read(file))
        return list(dict.fromkeys(one.url for one in found if one is not None and one.url is not None))

    def keep(self, url: str, name: str, identity: AgentIdentity) -> None:
        """Write an identity to its file, readable by its owner only."""
        write_private(self._file(url, name), identity.model_dump_json())

    @contextmanager
    def in_use(self, url: str, name: str) -> Iterator[None]:
        """Lock an identity inside the block.

        Raises:
            Conflict: another process holds the lock.
        """
        file = self._file(url, name).with_suffix(".lock")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(
                    f"this machine lends itself to {url} as {name} already",
                    hint="end the other `share-compute join`, or see `share-compute service status`",
                    machine=name,
                ) from None
            yield

    def _file(self, url: str, name: str) -> Path:
        return self._folder / f"{name}-{_server(url)}.json"


def _read(file: Path) -> AgentIdentity | None:
    return read_stored(AgentIdentity, file, hint="delete it, and join with a new invite")


def read_stored(kind: type[Model], file: Path, *, hint: str) -> Model | None:
    """Return the object in a file that this program wrote; None if there is no such file.

    Args:
        kind: pydantic model of the object.
        file: file with the object as JSON.
        hint: what to do if the file cannot be read.

    Raises:
        Unavailable: the file cannot be read.
    """
    try:
        return kind.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as failure:
        raise Unavailable(f"{file} cannot be read: {failure}", hint=hint) from failure


def _server(url: str) -> str:
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
