"""Failures of a job's members on request, for `share-compute chaos`.

The gateway imports this module, so this module must not import torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Literal

import ray

from share_compute.errors import Conflict
from share_compute.protocol.membership import Worker
from share_compute_actors.group.naming import all_members_of

_WAKE = (
    "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), signal.SIGCONT)"
)


class FailsOnRequest:
    """Mixin with the method through which `make_fail` makes an actor's process fail."""

    @ray.method(concurrency_group="control")
    def fail(self, kind: Literal["kill", "stop"], duration_s: float) -> None:
        """End this process at once ("kill"), or suspend it for ``duration_s`` seconds ("stop")."""
        kill() if kind == "kill" else freeze(duration_s)


def make_fail(job_id: str, worker: Worker, kind: Literal["kill", "stop"], duration_s: float = 0.0) -> None:
    """Make a job's members on one contributor fail; return without waiting for the failure.

    Args:
        job_id: id of the job.
        worker: id of the contributor.
        kind: the failure.
        duration_s: time for which a stopped member stays suspended, in seconds.

    Raises:
        Conflict: no member of the job runs on this contributor.
    """
    members = all_members_of(job_id, worker)
    if not members:
        raise Conflict(
            f"no member of the job runs on {worker} now",
            hint="choose another machine of its plan",
            job=job_id,
        )
    for member in members:
        member.fail.remote(kind, duration_s)


def kill() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(duration_s: float) -> None:
    """Suspend this process for ``duration_s`` seconds, with its sockets open; a helper process resumes it."""
    subprocess.Popen(
        [sys.executable, "-c", _WAKE, str(os.getpid()), str(duration_s)],
        start_new_session=True,
    )
    # If another thread handled a signal to the process, this thread would continue for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
