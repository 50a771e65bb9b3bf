"""Checks that a job names only files in the server's data roots (configured folders), after links are resolved."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import Final

from share_compute.errors import UserError
from share_compute.files.field_errors import refused
from share_compute.settings import Settings
from share_compute.specification import Named, with_paths
from share_compute.specification.paths import names_file

_PROCESSES: Final = (Path("/proc"), Path("/sys"))
"""Folders of kernel files. Jobs may never name files in them, even if a data root contains them."""
_DEVICES: Final = Path("/dev")
"""Folder of devices. Jobs may name a file in ``/dev`` only if a data root below ``/dev`` contains the file."""
_MOST_ENTRIES: Final = 10_000
_MOST_RESULT_FILES: Final = 10_000
_MOST_DEPTH: Final = 5
"""Levels of folders below a root that are searched for models; a cache of the Hugging Face Hub has three."""


def offered(settings: Settings, working_folder: Path) -> Settings:
    """Return the settings, with a default data root if they set none.

    The default is the working folder. A server that listens on a non-loopback address gets no default.

    Args:
        settings: the settings as given.
        working_folder: working folder of the command; not added if it contains the data folder.
    """
    is_given = "data_roots" in settings.model_fields_set
    if is_given or not _is_loopback(settings.host):
        return settings
    # A folder that contains the data folder, such as a home directory, would let the Ray head read the server's data.
    if settings.data_folder.resolve().is_relative_to(working_folder.resolve()):
        return settings
    return settings.model_copy(update={"data_roots": (working_folder,)})


def require_folders(settings: Settings) -> None:
    """Raise UserError if a data root is not a folder, because only folders can be made readable for the Ray head."""
    for root in settings.data_roots:
        if not root.is_dir():
            raise UserError(
                f"data root {root} is {'not a folder' if root.exists() else 'not there'}",
                hint="make it first, or give another folder to --data-root (or SHARE_COMPUTE_DATA_ROOTS)",
            )


def require_unlinked(path: Path, field: str) -> None:
    """Raise UserError if a path whose links were resolved earlier contains a link now."""
    if os.path.realpath(path) != str(path):
        raise refused(
            field, f"a part of {path} has become a link since it was submitted", "submit it with its new path"
        )


def require_no_links(folder: Path) -> None:
    """Raise UserError if a job's result has links; untrusted code on the Ray head can make links.

    Args:
        folder: folder of the result, which has at most `_MOST_RESULT_FILES` entries.
    """
    seen = 0
    for parent, folders, files in os.walk(folder):
        names = (*folders, *files)
        seen += len(names)
        if seen > _MOST_RESULT_FILES:
            raise UserError(
                f"the result has more than {_MOST_RESULT_FILES:,} files", hint="export the model again"
            )
        if any(Path(parent, name).is_symlink() for name in names):
            raise UserError("the result has links", hint="export the model again")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _entries(folder: Path, most: int) -> tuple[set[str], list[str], int]:
    """Return the names of a folder's files, those in its visible subfolders, and the number of entries that were read.

    Args:
        folder: the folder; an unreadable folder counts as empty.
        most: maximum number of entries that are read.
    """
    files: set[str] = set()
    folders: list[str] = []
    seen = 0
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, most):
                seen += 1
                if entry.is_dir(follow_symlinks=False):
                    folders += [] if entry.name.startswith(".") else [entry.name]
                else:
                    files.add(entry.name)
    except OSError:
        return set(), [], seen
    return files, sorted(folders), seen


class DataRoots:
    """Folders in which jobs may name files.

    Args:
        roots: absolute folders; may be links.
        private: folders of the server itself, which jobs may never name.
    """

    def __init__(self, roots: Sequence[Path], private: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._real_roots = tuple(Path(os.path.realpath(root)) for root in roots)
        self._private = tuple(Path(os.path.realpath(folder)) for folder in (*private, *_PROCESSES))

    def resolve(self, path: Path, field: str) -> Path:
        """Return the path with all links resolved.

        The error for a path outside the roots does not depend on whether the path exists.

        Args:
            path: path as given in the job.
            field: field of the job, for the error.

        Raises:
            UserError: the path is not absolute, contains ``..``, or is outside the roots before or after its links are
                resolved.
        """
        if not path.is_absolute():
            raise refused(field, f"{path} is a relative path", "write paths on the server in full")
        named = any(path.is_relative_to(root) for root in (*self._roots, *self._real_roots))
        # If a component is a link, ".." after it can lead out of the data roots.
        if not named or ".." in path.parts:
            raise self._outside(path, field)
        real = self._real(path)
        if real is None:
            raise self._outside(path, field)
        return real

    def check_folder(self, folder: Path, field: str) -> None:
        """Raise UserError if a folder has links to folders, links out of the data roots, or too many entries.

        The cache of the Hugging Face hub stores a model as a folder of links to files, so links to files are allowed.

        Args:
            folder: folder as returned by `resolve`.
            field: field of the job, for the error.
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

    def model_folders(self, most_folders: int, most_entries: int) -> tuple[list[Path], bool]:
        """Return the folders of models below the roots, and whether the search stopped at a limit.

        These folders have a config.json and a file of safetensors. The search is breadth-first. It follows no links to
        folders, skips hidden folders, and does not search inside the folder of a model.

        Args:
            most_folders: maximum number of folders that are returned.
            most_entries: maximum number of entries of folders that are read.
        """
        found: list[Path] = []
        level = deque((root, 0) for root in dict.fromkeys(self._real_roots))
        while level:
            folder, depth = level.popleft()
            names, folders, seen = _entries(folder, most_entries)
            most_entries -= seen
            if most_entries <= 0 or len(found) >= most_folders:
                return found, True
            if self._real(folder) is None:
                continue
            if "config.json" in names and any(name.endswith(".safetensors") for name in names):
                found.append(folder)
            elif depth < _MOST_DEPTH:
                level.extend((folder / name, depth + 1) for name in folders)
        return found, False

    def recheck(self, spec: Named) -> None:
        """Check the paths of a submitted specification again, before the job starts.

        Args:
            spec: the submitted specification, with the paths that `resolve` returned.

        Raises:
            UserError: a path now contains a link, or a folder in the data roots fails `check_folder`.
        """
        with_paths(spec, self._recheck)

    def _recheck(self, path: Path, field: str) -> Path:
        require_unlinked(path, field)
        if not names_file(field) and self._real(path) is not None:
            self.check_folder(path, field)
        return path

    def _real(self, path: Path) -> Path | None:
        try:
            real = Path(os.path.realpath(path))
        except ValueError:  # the path contains a NUL byte
            return None
        if any(real.is_relative_to(folder) for folder in self._private):
            return None
        is_device = real.is_relative_to(_DEVICES)
        above = [root for root in self._real_roots if real.is_relative_to(root)]
        return real if any(not is_device or not _DEVICES.is_relative_to(root) for root in above) else None

    def _outside(self, path: Path, field: str) -> UserError:
        if not self._roots:
            hint = "share-compute upload sends it; or start the server with --data-root FOLDER"
        else:
            roots = ", ".join(map(str, self._roots))
            hint = f"name what is below {roots}, or send it with share-compute upload"
        return refused(field, f"{path} is not below a folder that jobs may read", hint)
