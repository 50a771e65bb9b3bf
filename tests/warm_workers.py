"""Ray workers that are forked from a process that has imported all modules that actors need.

A Ray worker that trains imports torch and transformers: eight core-seconds for each member of each attempt.
Forked workers start at once. Each is still a process of its own, which Ray starts, monitors and ends.

Run as a script, this file replaces Ray's own ``setup_worker.py``: it requests a forked worker, and lives as long
as that worker does.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

_SOCKET = "WARM_TEST_WORKERS"
_MODULES = (
    "google.protobuf.struct_pb2",
    "google.protobuf.timestamp_pb2",
    "jsonschema",
    "logging.handlers",
    "msgpack",
    "pdb",
    "platformdirs",
    "requests",
    "scipy.stats",
    "share_compute.inference.runtime.engine_stage",
    "share_compute.inference.runtime.stage",
    "share_compute.inference.runtime.tensor_stage",
    "share_compute.inference.scheduler.scheduler",
    "share_compute.lifecycle.attempt_events",
    "share_compute.lifecycle.deployment_status",
    "share_compute.models.boundary",
    "share_compute.models.export",
    "share_compute.models.factory",
    "share_compute.models.huggingface.decoder",
    "share_compute.models.huggingface.slices",
    "share_compute.models.numbers",
    "share_compute.models.profiles.cache",
    "share_compute.models.storage.checkpoints",
    "share_compute.models.huggingface.image_classifier",
    "share_compute.planning.choice",
    "share_compute.planning.drift",
    "share_compute.planning.planner",
    "share_compute.planning.serving",
    "share_compute.protocol.coordinator",
    "share_compute.protocol.member",
    "share_compute.sparse.measuring",
    "share_compute.sparse.replica",
    "share_compute.sparse.snapshots",
    "share_compute.sparse.worker",
    "share_compute.synchronization.aggregator",
    "share_compute.synchronization.ranges",
    "share_compute.synchronization.rounds",
    "share_compute.training.early_stopping",
    "share_compute.training.finiteness",
    "share_compute.training.gradients",
    "share_compute.training.loss_scale",
    "share_compute.training.metric_checks",
    "share_compute.training.optimizers",
    "share_compute_actors.compiled.layers",
    "share_compute_actors.group.attempt_reports",
    "share_compute_actors.group.compute_thread",
    "share_compute_actors.group.control_requests",
    "share_compute_actors.inference.planner",
    "share_compute_actors.inference.scheduler_service",
    "share_compute_actors.inference.served_model",
    "share_compute_actors.sparse.messages",
    "share_compute_actors.testing.message_faults",
    "share_compute_actors.training.backups.copying",
    "share_compute_actors.training.backups.followers",
    "share_compute_actors.training.compiled_layers",
    "share_compute_actors.training.coordinator.connections",
    "share_compute_actors.training.coordinator.verdict",
    "share_compute_actors.training.member.evaluating",
    "share_compute_actors.training.member.layer_timer",
    "share_compute_actors.training.member.ranks",
    "share_compute_actors.training.member.schemas",
    "share_compute_actors.training.member.step_clock",
    "share_compute_actors.training.membership.epochs",
    "share_compute_actors.training.model_checks",
    "share_compute_actors.training.rounds.messages",
    "share_compute_actors.training.step_log",
    "share_compute_actors.transport.collective.routed",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
    "transformers.trainer_pt_utils",
    "zmq",
)
"""Without Ray: on import it reads the node's environment variables, such as the id of the job."""
_MOST_BYTES = 2**20
_POLL_S = 1.0
"""Interval in seconds at which the process checks whether the tests were killed."""


class Forks:
    """The process that workers are forked from.

    Args:
        folder: for its socket.
    """

    script = Path(__file__)
    """The program that nodes start workers with."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "workers"
        # One thread, since only the thread that forks is there afterwards.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, self.script, "--serve", self._path], env=environment, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if not self._process.stdout.read(1):
            raise RuntimeError("the process that workers are forked from did not start")
        os.environ[_SOCKET] = str(self._path)

    @staticmethod
    def of(process_id: int) -> int | None:
        """Return the id of the worker that was forked for a process that Ray started; None if there is none."""
        noted = Path(f"{os.environ[_SOCKET]}-{process_id}")
        return int(noted.read_text()) if noted.exists() else None

    def close(self) -> None:
        """End it; workers end with their nodes."""
        del os.environ[_SOCKET]
        self._process.kill()
        self._process.communicate()


def _serve(path: str) -> None:
    import importlib

    parent = os.getppid()
    for module in _MODULES:
        importlib.import_module(module)
    assert "ray" not in sys.modules
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads cannot be forked"
    gc.freeze()  # collections in forked processes leave these objects, and their pages, alone
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        os.write(1, b"+")
        listener.settimeout(_POLL_S)
        while os.getppid() == parent:  # killed tests do not end their processes
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            message, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
            if message and os.fork() == 0:
                listener.close()
                credentials = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
                )
                Path(f"{path}-{struct.unpack('3i', credentials)[0]}").write_text(str(os.getpid()))
                _become_worker(connection, json.loads(message), descriptors)
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)


def _become_worker(connection: socket.socket, wanted: dict[str, object], descriptors: list[int]) -> None:
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(wanted["environment"])  # type: ignore[call-overload]
    os.chdir(str(wanted["folder"]))
    sys.argv = list(wanted["arguments"])  # type: ignore[call-overload]
    threading.Thread(target=_die_with, args=(connection,), daemon=True).start()
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


def _die_with(connection: socket.socket) -> None:
    """End when the process that Ray started is ended."""
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _ask() -> None:
    """Request a forked worker, and wait for its end."""
    arguments = [
        one for one in sys.argv[1:] if not one.startswith(("--serialized-runtime-env", "--language"))
    ]
    wanted = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        connection.connect(os.environ[_SOCKET])
        socket.send_fds(connection, [json.dumps(wanted).encode()], [0, 1, 2])
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(sys.argv[2])
    else:
        _ask()
