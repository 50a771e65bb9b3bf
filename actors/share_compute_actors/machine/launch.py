"""Start one Ray node as a child process and wait until it is registered.

This module does not import Ray, so that a contributor's agent needs little memory and starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from share_compute.errors import Conflict, NotAuthorized, Unavailable, VersionMismatch
from share_compute.program import command_of
from share_compute_actors.machine.confine import Policy, clean_environment, confined
from share_compute_actors.machine.processes import Child, ChildProcesses, is_alive

_STARTED = "Ray runtime started"
_START_S = 60.0
"""Time limit for the start of a node, in seconds."""
ABSENCE_S = 600
"""Longest time for which processes wait for a host that is cut off or restarts, in seconds."""
GCS_SUPERVISOR = "gcs-supervisor"
"""File name of the script that runs and restarts the head's GCS; see `ray_start`."""
_VITAL = (GCS_SUPERVISOR, "raylet")
INLINE_LIMIT_BYTES = 8 * 2**20
"""Largest payload that Ray sends inside the call itself, in one round trip, in bytes."""


RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_max_direct_call_object_size": str(INLINE_LIMIT_BYTES),
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Under `uv run` Ray would start workers in separate environments.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # By default Ray sends three records of every call to the head, which keeps those of the last 100,000 calls. This
    # project does not use these records.
    "RAY_task_events_report_interval_ms": "0",
    # When a whole machine dies, Ray waits for the cause of its actors' deaths, which never arrives. A call to such an
    # actor fails after 1.2 to 1.4 s with the defaults of Ray 2.60 (1000 ms of waiting, checked each second), and after
    # 0.3 s with these values.
    "RAY_timeout_ms_task_wait_for_death_info": "200",
    "RAY_core_worker_internal_heartbeat_ms": "100",
    # gRPC sets this value as TCP_USER_TIMEOUT: TCP ends a connection if packets stay unacknowledged for this time.
    # Ray's default is two minutes. The value here is the time limit of Ray's health check for a node. After a network
    # cut, `machine/stalled.py` closes connections that still exist, and gRPC then reconnects at once. If TCP ended the
    # connection, gRPC would reconnect only after its own delays.
    "RAY_grpc_client_keepalive_timeout_ms": str(1000 * ABSENCE_S),
}
"""Environment variables of all Ray processes, in every cluster."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A Ray node that was started as a child process."""

    child: Child
    node_id: str
    """Ray's id of the node, in hexadecimal."""
    address: str
    """IP address at which other nodes reach this node."""
    gcs_address: str
    """Address of the cluster's GCS, as ``host:port``."""
    vital: Mapping[str, psutil.Process]
    """Processes without which the node is unusable, by program name: the raylet, and on a head the GCS supervisor."""

    @property
    def end(self) -> str | None:
        """Reason why the node is no longer usable; None while it runs.

        The processes in `vital` are checked, too, because ``ray start --block`` may run for a minute after one of them
        ends.
        """
        if self.child.exit_code is not None:
            return f"it ended with status {self.child.exit_code}: {self.child.last_words()}"
        return next((f"its {name} ended" for name, one in self.vital.items() if not is_alive(one)), None)


def ray_environment(token: str, folder: Path | None = None) -> dict[str, str]:
    """Return the environment variables of every process of the cluster.

    Args:
        token: the cluster's secret.
        folder: folder for Ray's files. Default: the system's temporary folder.
    """
    variables = {**RAY_SETTINGS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    if folder is not None:
        variables["RAY_TMPDIR"] = str(folder)
    return variables


def launch(
    children: ChildProcesses,
    name: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    policy: Policy,
    supervisor: Path | None = None,
) -> RayNode:
    """Run ``ray start --block`` with ``arguments``, confined, and wait until its node is registered.

    Args:
        children: starts the node as a child process.
        name: name of the child.
        arguments: arguments of ``ray start``.
        environment: variables to set, in addition to the inherited ones of `clean_environment`.
        policy: files that the node may use, and the user that it runs as.
        supervisor: on a head, path of the script that will run and restart the GCS.

    Raises:
        Unavailable: the node was not ready in time, or ended; the message says why.
        Conflict: a port is taken.
        NotAuthorized: the head refused the token.
        VersionMismatch: the head runs another Python or Ray.
    """
    # The arguments name the cluster to connect to. Inherited variables must not name another cluster.
    quiet = {"RAY_ADDRESS": "", "RAY_AUTH_TOKEN_PATH": "", "PYTHONWARNINGS": "ignore"}
    command = [
        *command_of("share_compute_actors.machine.ray_start"),
        *([] if supervisor is None else [str(supervisor)]),
        "start",
        "--block",
        "--disable-usage-stats",
        *arguments,
    ]
    child = children.start(
        name,
        confined(command, policy),
        environment={**quiet, **environment},
        inherits=clean_environment(os.environ),
    )
    try:
        _wait_until_started(child, name)
        node = _started_node(child)
    except BaseException:
        children.stop(child, grace_s=0)
        raise
    children.refresh()
    return node


def _wait_until_started(child: Child, name: str) -> None:
    if child.watch(lambda text: _STARTED in text or None, _START_S):
        return
    if child.exit_code is not None:
        raise _failure(child, name)
    raise Unavailable(
        f"the Ray {name} did not start within {_START_S:.0f} s",
        hint="try again; if that does not help, check the machine's load and its firewall",
        details={"log": child.log_tail()},
    )


def _started_node(child: Child) -> RayNode:
    vital: dict[str, psutil.Process] = {}
    options: dict[str, str] = {}
    for process in child.family():
        with suppress(psutil.NoSuchProcess):
            if process.name() in _VITAL:
                vital[process.name()] = process
            if process.name() == "raylet":
                words = process.cmdline()
                options = dict(
                    word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word
                )
    if not options:
        raise Unavailable(
            f"the raylet of {child.name} ended as soon as it had started",
            hint="try again; if that does not help, run share-compute doctor",
            details={"log": child.log_tail()},
        )
    return RayNode(child, options["node_id"], options["node_ip_address"], options["gcs-address"], vital)


def _failure(child: Child, name: str) -> Exception:
    text = child.log_tail(200)
    details = {"log": child.log_tail()}
    if "Version mismatch" in text or "version mismatch" in text:
        return VersionMismatch(
            "the head runs another version of Python or Ray",
            hint="install the versions that its /api/v1/health shows",
            details=details,
        )
    if "InvalidAuthToken" in text or "AuthenticationError" in text:
        return NotAuthorized(
            "the head refused the cluster's token", hint="join again with a new invite", details=details
        )
    if "is already running at" in text or "ddress already in use" in text:
        return Conflict(f"a port of the Ray {name} is taken", hint="choose another port", details=details)
    return Unavailable(
        f"the Ray {name} ended with status {child.exit_code}: {child.last_words()}",
        hint="try again; if that does not help, run share-compute doctor",
        details=details,
    )
