"""The Ray head: a supervised child with token authentication, whose memory survives a restart."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from share_compute.durable import write_private
from share_compute.errors import Conflict
from share_compute.settings import Settings
from share_compute_actors.machine.launch import RayNode, launch, ray_environment
from share_compute_actors.machine.processes import Roster

_OBJECT_STORE_BYTES = 200_000_000
_DEADLINE_S = 60.0
_RECONNECT_S = 600
"""How long nodes of contributors wait for a head that is being restarted."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head as the control plane uses it."""

    node: RayNode
    token: str
    folder: Path
    """Ray's temporary folder of this head."""

    @property
    def ray_address(self) -> str:
        """host:port for drivers and nodes."""
        return self.node.gcs_address

    @property
    def node_environment(self) -> dict[str, str]:
        """Variables that joining nodes must be started with."""
        return {"RAY_gcs_rpc_server_reconnect_timeout_s": str(_RECONNECT_S)}


def start_head(settings: Settings, roster: Roster, advertise_address: str) -> Head:
    """Start the head and wait until it stands.

    Args:
        settings: its port and health checks; the token and Ray's tables are kept in its data folder.
        roster: writes the child down; its folder must have a short path.
        advertise_address: IP address that contributors reach this machine at.

    Raises:
        Conflict: the port is taken.
        Unavailable: it did not start.
    """
    token = read_or_make_secret(settings.data_folder / "ray-token")
    folder = roster.folder / "ray"
    # With the address of an earlier run of ours in it, Ray refuses to use the same port again.
    (folder / "ray_current_cluster").unlink(missing_ok=True)
    tables = settings.data_folder / "ray-tables"
    tables.mkdir(parents=True, exist_ok=True)
    port = _choose_port(settings, settings.data_folder / "ray-port")
    period_ms = str(round(settings.health_period_s * 1000))
    environment = {
        **ray_environment(token, roster.folder),
        "RAY_health_check_initial_delay_ms": period_ms,
        "RAY_health_check_period_ms": period_ms,
        "RAY_health_check_timeout_ms": period_ms,
        "RAY_health_check_failure_threshold": str(settings.health_failures),
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(tables),
    }
    arguments = [
        "--head",
        f"--port={port}",
        f"--node-ip-address={advertise_address}",
        "--dashboard-host=127.0.0.1",
        "--dashboard-port=0",
        "--num-cpus=0",
        "--num-gpus=0",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={folder}",
        "--no-monitor",
        "--include-log-monitor=false",
    ]
    node = launch(roster, "head", arguments, environment=environment, deadline_s=_DEADLINE_S)
    return Head(node, token, folder)


def read_or_make_secret(file: Path) -> str:
    """Return the secret in ``file``, made on first use; only its owner may read it."""
    secret = _read(file)
    if not secret:
        secret = secrets.token_hex(32)
        write_private(file, secret)
    return secret


def _read(file: Path) -> str:
    """Return what is in the file; nothing when there is none, or when it was spoilt by a full disk."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _choose_port(settings: Settings, remembered: Path) -> int:
    """Keep the port of the last run: nodes of contributors come back to it by themselves."""
    if settings.ray_port:
        if not _is_free(settings.ray_port):
            raise Conflict(
                f"port {settings.ray_port} for the Ray head is taken",
                mend="end what uses it, or set SHARE_COMPUTE_RAY_PORT to another one (0 picks a free one)",
            )
        return settings.ray_port
    last = _read(remembered)
    if last.isdecimal() and 0 < int(last) < 2**16 and _is_free(int(last)):
        return int(last)
    port = _free_port()
    write_private(remembered, str(port))
    return port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
