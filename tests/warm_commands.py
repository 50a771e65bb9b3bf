"""Commands of share-compute that are forked from a process that has imported the modules that commands need.

A command of a new interpreter imports for one to four core-seconds before it does anything. A forked command starts at
once. It is still a process of its own, with its own arguments, environment, folder, output and exit status.

Run as a script, this file is the process that commands are forked from.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

_MODULES = (
    "rich.progress",
    "share_compute.data.tokenization",
    "share_compute.models.blueprint",
    "share_compute.models.factory",
    "share_compute.planning.choice",
    "share_compute.planning.planner",
    "share_compute.simulation.report",
    "share_compute.simulation.rounds",
    "share_compute.simulation.run",
    "share_compute.store.store",
    "share_compute_api.agent.agent",
    "share_compute_api.cli",
    "share_compute_api.client.client",
    "share_compute_api.client.pushing",
    "share_compute_api.client.tuning",
    "share_compute_api.terminal.report",
    "typer.rich_utils",
)
_READ_ON_IMPORT = ("huggingface_hub", "ray", "transformers")
"""Packages that read environment variables when they are imported: each command imports them itself."""
_MOST_BYTES = 2**20
_POLL_S = 1.0
"""Interval in seconds at which the process checks whether the tests were killed."""


def run_warm(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    text: str = "",
    folder: Path | None = None,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run ``share-compute`` with these arguments, and return its exit status and output.

    Args:
        words: arguments.
        environment: all environment variables of the command. Variables that an interpreter reads when it starts,
            such as PYTHONIOENCODING, have no effect.
        text: its standard input.
        folder: its working folder; None for that of the tests.
        timeout_s: it is killed after so many seconds.
    """
    wanted = {"words": [*words], "environment": {**environment}, "folder": str(folder or Path.cwd())}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as given,
        tempfile.TemporaryFile("w+", encoding="utf-8") as printed,
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        given.write(text)
        given.seek(0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        connection.settimeout(timeout_s)
        connection.connect(_start())
        descriptors = [file.fileno() for file in (given, printed, errors)]
        socket.send_fds(connection, [json.dumps(wanted).encode()], descriptors)
        try:
            status = int(connection.recv(16))
        except TimeoutError as failure:
            raise subprocess.TimeoutExpired([*words], timeout_s) from failure
        printed.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([*words], status, printed.read(), errors.read())


@cache
def _start() -> str:
    """Start the process that commands are forked from, and return the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="sc-")
    path = str(Path(folder.name) / "commands")
    command = [sys.executable, "-P", __file__, path]
    # One thread, since only the thread that forks is there afterwards.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if not process.stdout.read(1):
        raise RuntimeError("the process that commands are forked from did not start")

    def end() -> None:
        process.kill()
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    return path


class _Server:
    """Forks a process for each request, and answers with its exit status."""

    def __init__(self, path: str) -> None:
        self._parent = os.getppid()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._fork)

    def serve(self) -> None:
        """Answer until the tests end. Return in forked processes only."""
        while os.getppid() == self._parent:  # killed tests do not end their processes
            for key, _ in self._selector.select(_POLL_S):
                if key.data():
                    return
        sys.exit()

    def _fork(self) -> bool:
        """Start the command that a test requests; return whether this is its process."""
        connection, _ = self._listener.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
        process_id = os.fork() if message else None
        if process_id == 0:
            _become_command(json.loads(message), descriptors)
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        if process_id is None:
            connection.close()
            return False
        ended = os.pidfd_open(process_id)

        def kill() -> bool:
            """End a command whose test no longer waits for it."""
            if connection.fileno() < 0:
                return False  # the command ended at the same time
            self._selector.unregister(connection)
            connection.close()
            os.kill(process_id, signal.SIGKILL)
            return False

        def answer() -> bool:
            _, status = os.waitpid(process_id, 0)
            self._selector.unregister(ended)
            os.close(ended)
            if connection.fileno() >= 0:
                self._selector.unregister(connection)
                with suppress(ConnectionError):  # its test no longer waits
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                connection.close()
            return False

        self._selector.register(ended, selectors.EVENT_READ, answer)
        self._selector.register(connection, selectors.EVENT_READ, kill)
        return False


def _import_all() -> None:
    for module in _MODULES:
        importlib.import_module(module)
        early = [name for name in _READ_ON_IMPORT if name in sys.modules]
        assert not early, f"{module} imports {early} before the environment of a command is known"
        threads = list(Path("/proc/self/task").iterdir())
        assert len(threads) == 1, f"{module} starts a thread, which a forked process would lack"


def _become_command(wanted: dict[str, object], descriptors: list[int]) -> None:
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(wanted["environment"])  # type: ignore[call-overload]
    os.chdir(str(wanted["folder"]))
    sys.argv = ["share-compute", *wanted["words"]]  # type: ignore[misc]


if __name__ == "__main__":
    _import_all()
    gc.freeze()  # collections in forked processes leave these objects, and their pages, alone
    server = _Server(sys.argv[1])
    os.write(1, b"+")
    server.serve()
    from share_compute_api.cli import main

    main()
