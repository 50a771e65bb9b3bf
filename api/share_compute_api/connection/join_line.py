"""The command line that users paste on a machine that should join."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from share_compute_api.connection.connections import is_loopback

INVITE_VARIABLE: Final = "SHARE_COMPUTE_INVITE"


INSTALL_COMMAND: Final = (
    "git clone https://github.com/share-compute/share-compute && cd share-compute && make setup"
    " && . .venv/bin/activate"
)
"""Command that installs share-compute on a machine."""


def join_command(url: str, invite: str, *, insecure: bool = False) -> str:
    """Return the join command.

    The invite is in an environment variable, because all users of a machine can read command arguments.
    """
    return f"{INVITE_VARIABLE}={invite} share-compute join {url}" + (
        " --insecure" if insecure and url.startswith("http:") else ""
    )


def is_for_this_machine_alone(command: str) -> bool:
    """Return whether only this machine can join with a join command.

    No other machine reaches a loopback address, or gets the cluster's token over plain HTTP without ``--insecure``.
    """
    url, *options = command.partition(" join ")[2].split()
    parts = urlsplit(url)
    host = parts.hostname or ""
    is_refused = parts.scheme == "http" and "--insecure" not in options
    return is_refused or host == "localhost" or is_loopback(host)
