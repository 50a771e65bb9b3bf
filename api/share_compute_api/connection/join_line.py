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
    """Return whether the address in a join command can be reached only from this machine."""
    url = command.partition(" join ")[2].split()[0]
    host = urlsplit(url).hostname or ""
    return host == "localhost" or is_loopback(host)
