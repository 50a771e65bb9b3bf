"""The folder in which a machine keeps compiled code, so that later jobs need not compile the same layers again.

Artifacts are pickled, so a process loads only artifacts of its own machine. They are never sent to other machines, and
a folder that other users can write is not used.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from share_compute.errors import CompilerFailed, Unavailable
from share_compute_actors.machine.temporary import COMPILED, compiled_folder

MOST_BYTES = 2**30
"""Size of all artifacts above which the oldest are removed."""
_LOCK = "lock"


class Artifacts:
    """Compiled artifacts on disk. Create it before torch compiles anything in this process.

    Args:
        folder: folder of all artifacts; None for the folder that `COMPILED` names, else `compiled_folder`.
        most_bytes: size of all artifacts above which the oldest are removed.
        machine: name of the machine, for errors.
    """

    def __init__(
        self, folder: Path | None = None, most_bytes: int = MOST_BYTES, machine: str = "this machine"
    ) -> None:
        self._machine = machine
        named = os.environ.get(COMPILED)
        self._folder = folder or (Path(named) if named else None)
        self._most_bytes = most_bytes

    def own_folder(self) -> Path:
        """Return the folder of the artifacts that this process can use.

        Compiled code depends on the version of torch, the processor's instructions and the number of threads.
        """
        instructions = torch.backends.cpu.get_cpu_capability()
        name = f"torch-{torch.__version__}-{platform.machine()}-{instructions}-{torch.get_num_threads()}"
        return self.folder() / name

    def folder(self) -> Path:
        """Return the folder of all artifacts.

        Raises:
            CompilerFailed: the folder cannot be used.
        """
        try:
            self._folder = self._folder or compiled_folder()
        except Unavailable as failure:
            raise CompilerFailed(
                f"compiled code cannot be kept on {self._machine}: {failure.message}",
                hint=failure.hint,
                machine=self._machine,
            ) from failure
        return self._folder

    @contextmanager
    def used(self) -> Iterator[None]:
        """Return a context in which torch uses these artifacts; first remove the oldest if there are too many.

        Raises:
            CompilerFailed: the folder cannot be used, or other users can write it.
        """
        folder, own = self.folder(), self.own_folder()
        try:
            for each in (folder, own):
                self._require_private(each)
            os.utime(own)  # remove the version in use last
            os.environ[COMPILED] = str(own)
            with (folder / _LOCK).open("w") as lock:
                with suppress(BlockingIOError):  # another process compiles
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._prune(folder)
                fcntl.flock(lock, fcntl.LOCK_SH)
                yield
        except OSError as failure:
            raise CompilerFailed(
                f"compiled code cannot be kept on {self._machine} in {folder}: {failure.strerror or failure}",
                hint="make space on the disk, or let the owner of the node write the folder",
                machine=self._machine,
            ) from failure

    def _prune(self, folder: Path) -> None:
        """Remove the artifacts of the least recently used versions, until the rest is small enough."""
        versions = [each for each in folder.iterdir() if each.is_dir()]
        sizes = {each: sum(file.lstat().st_size for file in each.rglob("*")) for each in versions}
        for each in sorted(versions, key=lambda version: version.lstat().st_mtime):
            if sum(sizes.values()) <= self._most_bytes:
                return
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir(mode=0o700)  # for processes that have chosen it
            sizes[each] = 0

    def _require_private(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise CompilerFailed(
                f"other users of {self._machine} can change {folder}, so compiled code is not kept there",
                hint="let only the owner of the node write the folder, e.g. with chmod 700",
                machine=self._machine,
            )
