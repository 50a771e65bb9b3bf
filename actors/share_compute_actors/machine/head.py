"""Starts the Ray head, a confined child process. Its clients need a token, and its tables survive a restart.

Jobs' coordinators and shard stores, and deployments' servers, run on the head. Any holder of the cluster's token can
run code there, too. So the head is confined (`confine`). The head can read data roots, uploads and batches, and change
jobs' folders and Ray's own folders. It cannot access the control plane's database, keys or process.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from share_compute.errors import Conflict
from share_compute.files.durable import write_private
from share_compute.files.plain_files import opened_parent
from share_compute.lifecycle.folders import BATCHES, TRAINING
from share_compute.settings import Settings
from share_compute_actors.machine.confine import Policy, landlock_version, unprivileged_user
from share_compute_actors.machine.launch import ABSENCE_S, GCS_SUPERVISOR, RayNode, launch, ray_environment
from share_compute_actors.machine.ports import NodePorts, PortRange
from share_compute_actors.machine.processes import ChildProcesses

_OBJECT_STORE_BYTES = 200_000_000
_WORKERS = 150
"""Number of Ray workers that the head has ports for: two for each job (coordinator, shard store), one for each
deployment."""
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "5000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": str(ABSENCE_S // 5),
}
"""Environment variables that make Ray's health checks wait for nodes as long as nodes wait for the head.

A node that Ray has declared dead ends all its processes. This project detects losses much sooner, without Ray:
coordinators watch their members' heartbeats, and the control plane watches the agents' reports."""
_PRIORITY = {"RAY_worker_niceness": "0"}
"""Environment variables that give the head's actors the priority of the control plane.

Ray starts workers with niceness 15. Where other programs use the processors, the server of a deployment, for which
streams wait after a restart, would get a thirtieth of their time. Each training step waits for its coordinator."""
_TOKEN, _STALE, _TABLES, _CACHE = "ray-token", "ray-token-is-stale", "ray-tables", "cache"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """Facts about a head that are known before it runs."""

    token: str
    folder: Path
    """Ray's temporary folder of this head."""
    policy: Policy
    """The policy that confines the head, and drivers on the same machine."""
    environment: dict[str, str]
    """Environment variables that drivers on the same machine must be started with."""
    ports: NodePorts
    """Ports of the head; code that replaces the head must release them."""


@dataclass(frozen=True, slots=True)
class Head:
    """A running head."""

    node: RayNode
    place: HeadPlace

    @property
    def ray_address(self) -> str:
        """Address of the head for drivers and nodes, as ``host:port``."""
        return self.node.gcs_address

    @property
    def node_environment(self) -> dict[str, str]:
        """Environment variables that joining nodes must be started with."""
        return {"RAY_gcs_rpc_server_reconnect_timeout_s": str(ABSENCE_S)}


def start_head(
    settings: Settings,
    children: ChildProcesses,
    advertise_address: str,
    *,
    beside: Callable[[HeadPlace], object] = lambda _: None,
) -> Head:
    """Start the head and wait until it is registered.

    Args:
        settings: settings of the server; the token and Ray's tables are kept in its data folder.
        children: starts the head as a child process; ``children.folder`` must have a short path.
        advertise_address: IP address at which contributors reach this machine.
        beside: called just before the head starts, to start processes that will connect to the head.

    Raises:
        Conflict: the port is taken, the range has too few free ports, or a data root contains the data folder.
        Unavailable: the head did not start.
    """
    token = read_or_make_secret(settings.data_folder / _TOKEN)
    # Ray gives all users access to its folder, so the folder above it must be private. Sockets need a short path.
    folder = children.folder / "r" / "s"
    tables = settings.data_folder / _TABLES
    policy = head_policy(settings, children.folder, tables)
    # Ray refuses to use the same port again if this file has the address of an earlier run.
    (folder / "ray_current_cluster").unlink(missing_ok=True)
    shared = {**ray_environment(token, children.folder), "TMPDIR": str(children.folder / "tmp")}
    environment = {
        **shared,
        **HEALTH_CHECKS,
        **_PRIORITY,
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(tables),
        "XDG_CACHE_HOME": str(settings.data_folder.resolve() / _CACHE),
    }
    with ExitStack() as stack:
        within = PortRange.parse(settings.port_range)
        ports = NodePorts.take(within, _WORKERS)
        stack.callback(ports.release)
        port = _choose_port(settings, within, settings.data_folder / "ray-port", ports.workers)
        arguments = [
            "--head",
            f"--port={port}",
            f"--node-ip-address={advertise_address}",
            "--num-cpus=0",
            "--num-gpus=0",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--temp-dir={folder}",
            "--no-monitor",
            "--include-log-monitor=false",
            *ports.arguments(apart_from=port),
        ]
        place = HeadPlace(token=token, folder=folder, policy=policy, environment=shared, ports=ports)
        beside(place)
        node = launch(
            children,
            "head",
            arguments,
            environment=environment,
            policy=policy,
            supervisor=folder.parent / GCS_SUPERVISOR,
        )
        stack.pop_all()
    return Head(node, place)


def invalidate_token(data_folder: Path) -> None:
    """Mark the cluster's token as stale after a machine has left; the mark survives a restart of the server."""
    write_private(data_folder / _STALE, "")


def has_stale_token(data_folder: Path) -> bool:
    """Return whether a machine that has left the cluster knows the current token."""
    return (data_folder / _STALE).exists()


def renew_token(data_folder: Path) -> None:
    """Make a new token for the next head, and remove Ray's tables.

    The tables list the actors that Ray restarts by itself. A restarted actor of a machine that left would learn the new
    token.
    """
    shutil.rmtree(data_folder / _TABLES, ignore_errors=True)
    write_private(data_folder / _TOKEN, secrets.token_hex(32))
    (data_folder / _STALE).unlink(missing_ok=True)


def hand_over(policy: Policy, paths: Iterable[Path]) -> None:
    """Make the head's user the owner of files, and of folders with all their content.

    Do nothing if the head runs as this process's user.

    Args:
        policy: policy of the head.
        paths: files and folders. No folder above them may be a symbolic link. Links in the folders are not followed.
    """
    if policy.user is None:
        return
    for path in paths:
        for folder, name in _tree(path):
            os.chown(name, policy.user.uid, policy.user.gid, dir_fd=folder, follow_symlinks=False)


def show(policy: Policy, paths: Iterable[Path], below: Path) -> None:
    """Allow the head's user to read some files, and all users to enter the folders above them.

    Do nothing if the head runs as this process's user. Links in ``paths`` are not followed.

    Args:
        policy: policy of the head.
        paths: files, and folders with all their content.
        below: a folder that contains all of ``paths``; the topmost folder that all users may enter afterwards.
    """
    if policy.user is None:
        return
    for path in paths:
        for parent in path.relative_to(below).parents:
            (below / parent).chmod(0o711)
        for folder, name in _tree(path):
            os.chown(name, -1, policy.user.gid, dir_fd=folder, follow_symlinks=False)
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if not stat.S_ISLNK(mode):
                os.chmod(name, 0o750 if stat.S_ISDIR(mode) else 0o640, dir_fd=folder)


def _tree(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (descriptor of the parent folder, name) for a path and everything below it, without following links.

    The head may replace a folder by a link at any time, so code must not open these files by their paths.
    """
    with opened_parent(path) as folder:
        yield folder, path.name
        if stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            for _, folders, files, inner in os.fwalk(path.name, dir_fd=folder):
                for name in (*folders, *files):
                    yield inner, name


def head_policy(settings: Settings, run_folder: Path, tables: Path) -> Policy:
    """Return the policy that confines the head; make the folders that the head needs, owned by the head's user.

    Raises:
        Conflict: a data root contains the data folder.
    """
    data_folder = settings.data_folder.resolve()
    jobs, uploads, batches = (data_folder / name for name in (TRAINING, "uploads", BATCHES))
    for root in settings.data_roots:
        if data_folder.is_relative_to(root.resolve()):
            raise Conflict(
                f"the data root {root} contains the server's own data folder, {settings.data_folder}",
                hint="choose another --data-root: code of jobs can read all files below it",
            )
    own = [data_folder / _CACHE, *(run_folder / name for name in ("r", "tmp", "home"))]
    user, why_not = unprivileged_user(settings.head_user, [str(settings.data_folder.parent)])
    for folder in (tables, jobs, uploads, batches, *own):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    policy = Policy(
        read=(str(uploads), str(batches), *map(str, settings.data_roots)),
        write=(str(tables), str(jobs), *map(str, own)),
        home=str(run_folder / "home"),
        user=user,
    )
    if user is not None:
        for folder in (settings.data_folder, run_folder, run_folder.parent):
            # Other users may enter the folder, but not list it.
            folder.chmod(0o711)
        hand_over(policy, (path.parent.resolve() / path.name for path in (tables, jobs, uploads, *own)))
    elif why_not:
        _log.warning("the Ray head runs as root, without privileges: %s", why_not)
    if not landlock_version():
        _log.warning(
            "this system cannot confine the Ray head to its files (Landlock, Linux 5.13): "
            "holders of the cluster's token can read every file that this user can read"
        )
    return policy


def read_or_make_secret(file: Path) -> str:
    """Return the secret in ``file``; if there is none, write a new one, which only this user may read."""
    secret = _read(file)
    if not secret:
        secret = secrets.token_hex(32)
        write_private(file, secret)
    return secret


def _read(file: Path) -> str:
    """Return the content of a text file; empty if the file is missing, or damaged by a full disk."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _choose_port(settings: Settings, within: PortRange, remembered: Path, free: Sequence[int]) -> int:
    """Return the configured port, else the port of the last run if it is free and in the range, else a free port.

    Contributors' nodes automatically reconnect to the port of the last run.

    Raises:
        Conflict: the configured port is taken.
    """
    if settings.ray_port:
        if not _is_free(settings.ray_port):
            raise Conflict(
                f"port {settings.ray_port} for the Ray head is taken",
                hint="end the program that uses it, or set SHARE_COMPUTE_RAY_PORT to another port (0: any free port)",
            )
        return settings.ray_port
    last = _read(remembered)
    if last.isdecimal() and within.first <= int(last) <= within.last and _is_free(int(last)):
        return int(last)
    write_private(remembered, str(free[-1]))
    return free[-1]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
