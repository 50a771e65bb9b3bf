"""The line that people paste on a machine that is to join."""

from __future__ import annotations

from typing import Final

INVITE_VARIABLE: Final = "SHARE_COMPUTE_INVITE"


INSTALL_COMMAND: Final = (
    "git clone https://github.com/share-compute/share-compute && cd share-compute && make setup"
    " && . .venv/bin/activate"
)
"""Installs share-compute on a machine that lacks it."""


def join_command(url: str, invite: str, *, insecure: bool = False) -> str:
    """Return the line. The invite is in the environment, since arguments can be read by all users of a machine."""
    return f"{INVITE_VARIABLE}={invite} share-compute join {url}" + (
        " --insecure" if insecure and url.startswith("http:") else ""
    )
