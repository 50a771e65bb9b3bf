"""Finds this machine's server and its API key in the data folder that `share-compute up` writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from share_compute.errors import Unavailable
from share_compute.quantities import listed
from share_compute.settings import ClientSettings
from share_compute_api.connection.fingerprints import parse_fingerprint
from share_compute_api.connection.identity import Identities, read_stored

SERVER_FILE = "server.json"
CREDENTIALS_FILE = "credentials.json"
_HINT = "start the server again with `share-compute up`"


class ServerFile(BaseModel):
    """Contents of `server.json`, which a running server writes."""

    url: str
    pid: int
    fingerprint: str | None = None


class CredentialsFile(BaseModel):
    """Contents of `credentials.json`, which holds the operator's API key."""

    api_key: str


@dataclass(frozen=True, slots=True)
class Target:
    """URL of a control plane, and the API key for it if one is known."""

    url: str
    api_key: str | None = field(repr=False)
    fingerprint: str | None = None
    """Fingerprint of the server's key; None to verify the certificate with public authorities."""


def find_target(
    url: str | None = None,
    api_key: str | None = None,
    data_folder: Path | None = None,
    fingerprint: str | None = None,
) -> Target:
    """Return the server to use: the one at ``url``, else the one in the settings, else this machine's server.

    The API key in this machine's data folder is only sent to this machine's server.

    Raises:
        Unavailable: no URL is given and `server.json` is missing, or a file of the folder cannot be read.
        UserError: the fingerprint is not valid.
    """
    settings = ClientSettings()
    folder = data_folder or settings.data_folder
    url, api_key = url or settings.url, api_key or settings.api_key
    fingerprint = fingerprint or settings.fingerprint
    pin = parse_fingerprint(fingerprint) if fingerprint else None
    if url is not None and api_key is not None and (pin is not None or not url.startswith("https:")):
        return Target(url.rstrip("/"), api_key, pin)
    server = read_stored(ServerFile, folder / SERVER_FILE, hint=_HINT)
    if url is None and server is None:
        raise _no_server(folder)
    local = server.url.rstrip("/") if server else None
    url = url.rstrip("/") if url else local
    assert url is not None
    if api_key is None and url == local:
        credentials = read_stored(CredentialsFile, folder / CREDENTIALS_FILE, hint=_HINT)
        api_key = credentials.api_key if credentials else None
    return Target(url, api_key, pin or (server.fingerprint if server and url == local else None))


def _no_server(folder: Path) -> Unavailable:
    missing = f"no server runs on this machine ({folder / SERVER_FILE} is missing)"
    if lent_to := Identities(folder).urls():
        return Unavailable(
            f"{missing}; it joined {listed(lent_to)}",
            hint="to start a server here: share-compute up. The terminal of `share-compute join` shows this machine's "
            "work, or the log that `share-compute service status` names. For jobs on that server, run the line that "
            "`share-compute keys create` prints for its operator",
        )
    return Unavailable(
        missing, hint="start one with `share-compute up`, or name one: SHARE_COMPUTE_URL=http://host:8700"
    )
