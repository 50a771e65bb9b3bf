"""Which files of the server a job may name: those below configured folders, once all links are followed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from share_compute.errors import UserError
from share_compute.settings import Settings
from share_compute_api.model_folders import refused

_SYSTEM: Final = tuple(map(Path, ("/dev", "/proc", "/sys")))
"""Files here are devices and processes; a root above them does not include them."""
_MOST_ENTRIES: Final = 10_000


def offered(settings: Settings, working_folder: Path) -> Settings:
    """Return the settings with the working folder as a data root, where nothing was said and only this machine asks.

    Args:
        settings: as given.
        working_folder: of whoever starts the server.
    """
    is_given = "data_roots" in settings.model_fields_set
    if is_given or not _is_loopback(settings.host) or working_folder == Path(working_folder.anchor):
        return settings
    return settings.model_copy(update={"data_roots": (working_folder,)})


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class DataRoots:
    """The folders below which jobs may name files.

    Args:
        roots: absolute folders; may be links.
        private: folders that are below no root, wherever they are: the server's own.
    """

    def __init__(self, roots: Sequence[Path], private: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._real_roots = tuple(Path(os.path.realpath(root)) for root in roots)
        self._private = tuple(Path(os.path.realpath(folder)) for folder in private)

    def resolve(self, path: Path, field: str) -> Path:
        """Return where a path leads; no component of the result is a link.

        The error for a path outside the roots does not depend on what is there.

        Args:
            path: as the job names it.
            field: of the job, for the error.

        Raises:
            UserError: it is not absolute, or it is outside the roots before or after its links are followed.
        """
        if not path.is_absolute():
            raise refused(field, f"{path} is a relative path", "write paths on the server in full")
        named = any(path.is_relative_to(root) for root in (*self._roots, *self._real_roots))
        # With "..", what the path means depends on links outside the roots.
        if not named or ".." in path.parts:
            raise self._outside(path, field)
        real = self._real(path)
        if real is None:
            raise self._outside(path, field)
        return real

    def check_folder(self, folder: Path, field: str) -> None:
        """Raise UserError when a link in a folder leads out of the roots, or to a folder.

        Models that the Hugging Face hub keeps are folders of links to files, so links are not refused as such.

        Args:
            folder: as `resolve` returned it.
            field: of the job, for the error.
        """
        seen = 0
        for parent, folders, files in os.walk(folder):
            seen += len(folders) + len(files)
            if seen > _MOST_ENTRIES:
                raise refused(
                    field, f"{folder} holds more than {_MOST_ENTRIES} files", "name the model's own folder"
                )
            for name in folders:
                if (Path(parent) / name).is_symlink():
                    raise refused(
                        field, f"{name} in {folder} is a link to a folder", "copy the folder in its place"
                    )
            for name in files:
                file = Path(parent) / name
                if file.is_symlink() and self._real(file) is None:
                    raise self._outside(file, field)

    def _real(self, path: Path) -> Path | None:
        try:
            real = Path(os.path.realpath(path))
        except ValueError:  # a NUL byte
            return None
        if any(real.is_relative_to(folder) for folder in self._private):
            return None
        system = [folder for folder in _SYSTEM if real.is_relative_to(folder)]
        for root in self._real_roots:
            if real.is_relative_to(root) and not any(folder.is_relative_to(root) for folder in system):
                return real
        return None

    def _outside(self, path: Path, field: str) -> UserError:
        if not self._roots:
            hint = "share-compute upload sends it; or start the server with --data-root FOLDER"
        else:
            roots = ", ".join(map(str, self._roots))
            hint = f"name what is below {roots}, or send it with share-compute upload"
        return refused(field, f"{path} is not below a folder that jobs may read", hint)
