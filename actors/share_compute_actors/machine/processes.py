"""Starts child processes that cannot outlive this process, and ends each of them together with its descendants.

Three mechanisms back each other up:

1. The process that starts a child ends it (`ChildProcesses.stop`).
2. On Linux, the kernel ends the child when this process dies.
3. Children are listed in a file. The next run ends children that a killed run left (`ChildProcesses.end_leftovers`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TextIO, TypeVar

import psutil

from share_compute.errors import Unavailable
from share_compute_actors.machine.confine import END_NOW

_TIE_TO_PARENT = """\
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
_POLL_S = 0.02
_WATCH_S = 0.05
_END_S = 5.0
"""Time limit for killed processes to end, in seconds."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TICKS = 19
"""Index of a process's start time among the fields that follow its name in `/proc/PID/stat`."""
_log = logging.getLogger(__name__)
Found = TypeVar("Found")

# The kernel ends a tied child when the *thread* that started it ends, so a single lasting thread starts all children.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starts-children")


def tied(arguments: Sequence[str]) -> list[str]:
    """Return a command that runs ``arguments`` and, on Linux, is killed when the thread that started it ends.

    A small program sets PR_SET_PDEATHSIG (see prctl(2)) and then replaces itself with ``arguments``. Popen's
    ``preexec_fn`` could set it too, but is unsafe because this process has threads.
    """
    return [sys.executable, "-I", "-S", "-c", _TIE_TO_PARENT, str(os.getpid()), *arguments]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Pid and start time of a process; a later process with the same pid has a different start time."""

    pid: int
    start: str
    """Exact start time; comparable only with start times on the same system."""

    @classmethod
    def of(cls, process: psutil.Process) -> ProcessIdentity:
        """Return the identity of a process.

        Raises:
            psutil.NoSuchProcess: the process has ended.
        """
        return cls(process.pid, _start_of(process))

    def find(self) -> psutil.Process | None:
        """Return the process; None if it has ended."""
        try:
            # Create the object before the comparison, because psutil then never acts on a later process with this pid.
            process = psutil.Process(self.pid)
            return process if ProcessIdentity.of(process) == self and is_alive(process) else None
        except psutil.NoSuchProcess:
            return None


def _start_of(process: psutil.Process) -> str:
    if sys.platform != "linux":
        return repr(process.create_time())
    # The start time is in ticks since boot, because the system's clock may change at any time.
    try:
        facts = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError) as failure:
        raise psutil.NoSuchProcess(process.pid) from failure
    ticks = facts.rpartition(")")[2].split()[_START_TICKS]
    return f"{_BOOT_ID.read_text().strip()} {ticks}"


class Child:
    """A child process of this process, with all its descendants."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        """File with the child's output."""
        self._process = process
        # The child was not reaped yet, so its pid cannot have been reused, even if the child has ended.
        self._family = {process.pid: psutil.Process(process.pid)}

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit status of the child; None while it runs, the negative signal number if a signal ended it."""
        return self._process.poll()

    def family(self) -> list[psutil.Process]:
        """Return the child and its descendants that still run.

        A descendant whose parent has ended is included if an earlier call of this method found it.
        """
        # Iterate over copies, because another thread may call this method at the same time.
        for member in list(self._family.values()):
            try:
                for descendant in member.children(recursive=True):
                    self._family.setdefault(descendant.pid, descendant)
            except psutil.NoSuchProcess:
                continue
        for pid, process in list(self._family.items()):
            if not is_alive(process):
                self._family.pop(pid, None)
        return list(self._family.values())

    def known(self) -> list[psutil.Process]:
        """Return the result of the last `family` call, without searching again; some processes may have ended."""
        return list(self._family.values())

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the child's output."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def last_words(self) -> str:
        """Return the first 300 characters of the last non-empty line of the child's output, for error messages."""
        lines = (line.strip() for line in reversed(self.log_tail().splitlines()))
        return next(filter(None, lines), "it printed nothing")[:300]

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the child ends, and return its exit status; None if it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def watch(self, find: Callable[[str], Found | None], deadline_s: float) -> Found | None:
        """Call ``find`` with the child's whole output until ``find`` returns a result; return the result.

        Return None if the child ends without a result, or after ``deadline_s`` seconds.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            is_last = self.exit_code is not None or time.monotonic() > deadline
            found = find(self.log.read_text(errors="replace"))
            if found is not None or is_last:
                return found
            time.sleep(_WATCH_S)

    def interrupt(self) -> None:
        """Ask the child to end (SIGTERM), without waiting."""
        if self.exit_code is None:
            self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """Send the child SIGTERM, wait up to ``grace_s`` seconds for its end, and kill the rest of its family."""
        if self.exit_code is None:
            self.family()
        self.interrupt()
        self.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill the child and its family, without SIGTERM; wait until the child has ended."""
        family = self.family()
        # On END_NOW the guard of a confined program kills all descendants, including those missing from `family`.
        self._process.send_signal(END_NOW)
        self.wait(_END_S)
        # Only the first wait gets the exit status, which `Popen` needs. So `end_processes` must not wait for the child.
        self._process.kill()
        self._process.wait()
        end_processes(member for member in family if member.pid != self.pid)


def end_processes(processes: Iterable[psutil.Process]) -> None:
    """Kill these processes, and wait up to 10 s until they have ended; zombies count as ended."""
    doomed = list(processes)
    for number in (END_NOW, signal.SIGKILL):  # END_NOW lets guards kill their descendants before they end
        doomed = [process for process in doomed if is_alive(process)]
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        deadline = time.monotonic() + _END_S
        while any(is_alive(process) for process in doomed) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs: it is not a zombie, and its pid was not reused."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class ChildProcesses:
    """Starts and ends child processes, and lists them in a file, so that a later run can end remaining ones.

    Args:
        folder: folder for the list and for the output of the children; only one process may use it at a time.
        lock: open file whose lock reserves the folder for this process; None if the folder is not locked.
    """

    def __init__(self, folder: Path, lock: TextIO | None = None) -> None:
        self.folder = folder
        self.lock = lock
        self._file = folder / "processes.json"
        self._children: list[Child] = []
        self._lock = Lock()
        self._is_stale = False
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        inherits: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
        cwd: Path | None = None,
        output: int | None = None,
    ) -> Child:
        """Start a child in its own session, so that Ctrl-C reaches only this process.

        Args:
            name: name of the child in messages, and of its log file.
            arguments: program and arguments.
            environment: variables to set. They take precedence over inherited variables.
            inherits: variables that the child inherits. Default: all variables of this process.
            files: descriptors of open files that the child gets under the same numbers.
            cwd: working folder of the child.
            output: descriptor of an open file for standard output. Default: the log file, which
                always gets standard error.

        Raises:
            Unavailable: the child cannot be started, for example because the folder cannot be written.
        """
        try:
            # KeyboardInterrupt may end this call, but not `_start`, which runs on another thread and lists the child.
            # So no started child is missing from the list.
            variables = {**(os.environ if inherits is None else inherits), **environment}
            return _starter.submit(self._start, name, arguments, variables, files, cwd, output).result()
        except OSError as failure:
            raise Unavailable(
                f"{name} cannot be started: {failure}",
                hint=f"check that {self.folder} can be written and its disk is not full",
            ) from failure

    def _start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int],
        cwd: Path | None,
        output: int | None,
    ) -> Child:
        log = self.folder / f"{name}.log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                tied(arguments),
                env=environment,
                cwd=cwd,
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=written if output is None else output,
                stderr=written,
                start_new_session=True,
            )
        child = Child(name, process, log)
        with self._lock:
            self._children.append(child)
        try:
            self.write()
        except OSError:
            self.stop(child, grace_s=0)
            raise
        return child

    def refresh(self) -> None:
        """Rewrite the list of processes; call this method regularly, because children start further processes.

        A failure to write is only logged, because an outdated list must not end working processes.
        """
        try:
            self.write()
        except OSError as failure:
            if not self._is_stale:
                _log.warning("the list of processes in %s cannot be updated: %s", self.folder, failure)
            self._is_stale = True
        else:
            self._is_stale = False

    def write(self) -> None:
        """Write the list of all children and their descendants to the file.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._lock:
            rows = []
            for member in (member for child in self._children for member in child.family()):
                try:
                    identity = ProcessIdentity.of(member)
                    rows.append([identity.pid, identity.start])
                except psutil.NoSuchProcess:
                    continue
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(rows))
            partial.replace(self._file)

    def stop(self, child: Child, grace_s: float = 10.0) -> None:
        """End one child and its family, as `Child.stop` does, and remove it from the list."""
        child.stop(grace_s)
        with self._lock:
            self._children = [other for other in self._children if other is not child]
        self.refresh()

    def stop_all(self, grace_s: float = 10.0) -> None:
        """End all children, in reverse order of their start."""
        _starter.submit(int).result()  # wait until a child that is being started is listed
        for child in reversed(self._children):
            self.stop(child, grace_s)
        self._forget()

    def kill_all(self) -> None:
        """Kill all children and their families, without SIGTERM."""
        for child in list(self._children):
            child.kill()

    def leftovers(self) -> list[psutil.Process]:
        """Return the listed processes that still run and were started by an earlier owner of this folder."""
        try:
            written = [ProcessIdentity(pid, start) for pid, start in json.loads(self._file.read_text())]
        except (FileNotFoundError, ValueError, TypeError):
            return []
        own = {member.pid for child in self._children for member in child.family()}
        found = (identity.find() for identity in written)
        return [process for process in found if process is not None and process.pid not in own]

    def end_leftovers(self) -> int:
        """End all `leftovers` and their descendants; return the number of ended processes."""
        left = {process.pid: process for process in self.leftovers()}
        for process in list(left.values()):
            try:
                left.update({child.pid: child for child in process.children(recursive=True)})
            except psutil.NoSuchProcess:
                continue
        end_processes(left.values())
        self._forget()
        return len(left)

    def _forget(self) -> None:
        with suppress(OSError):  # all listed processes have ended, so an old list is harmless
            self._file.unlink(missing_ok=True)
