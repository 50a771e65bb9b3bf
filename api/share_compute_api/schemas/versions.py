"""Reads the versions of installed packages without importing them, and compares the versions on two machines."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

from share_compute.errors import VersionMismatch
from share_compute_api.schemas.bodies import Versions

_PARTS = {"python": 3, "ray": 3, "torch": 2, "share_compute": 2}
"""Number of leading parts of each version that must be the same on the server and a joining machine."""
_HINTS = {
    "python": "install Python {wanted} on the joining machine",
    "ray": "pip install 'ray=={wanted}' on the joining machine",
    "torch": "pip install 'torch=={wanted}' on the joining machine",
    "share_compute": "pip install 'share-compute=={wanted}' on the joining machine",
}


@cache
def local_versions() -> Versions:
    """Return the versions of Python, Ray, PyTorch and share-compute on this machine."""
    return Versions(
        python=platform.python_version(),
        ray=version("ray"),
        torch=version("torch").split("+")[0],
        share_compute=version("share-compute"),
    )


def check_versions(server: Versions, joining: Versions) -> None:
    """Raise VersionMismatch if a joining machine's versions are incompatible with the server's."""
    for name, parts in _PARTS.items():
        wanted, given = getattr(server, name), getattr(joining, name)
        if wanted.split("+")[0].split(".")[:parts] != given.split("+")[0].split(".")[:parts]:
            raise VersionMismatch(
                f"the server runs {name} {wanted}, the joining machine {given}",
                hint=_HINTS[name].format(wanted=wanted),
                details={"name": name, "server": wanted, "joining": given},
            )
