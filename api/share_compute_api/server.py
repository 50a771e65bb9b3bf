"""The server: a Ray head and the control plane, started together and ended together."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from alembic.util.exc import CommandError

from share_compute.errors import Conflict, ShareComputeError, Unavailable, UserError, as_ours
from share_compute.settings import Settings
from share_compute.store import Store, upgrade
from share_compute_actors.machine.head import Head, start_head
from share_compute_actors.machine.launch import ray_environment
from share_compute_actors.machine.preflight import route_address
from share_compute_actors.machine.processes import Child, Roster
from share_compute_actors.machine.run_folders import close_run_folder, open_run_folder
from share_compute_api.app import create_app, end_streams
from share_compute_api.children import Interrupts, own_command
from share_compute_api.data_folder import first_api_key, locked, write_server_file
from share_compute_api.supervision import ClusterInfo

if TYPE_CHECKING:
    from fastapi import FastAPI

_WRITE_TICKS = 100
"""Ray starts more processes as it goes: every so many tenths of a second they are written down again."""
_CONNECTIONS_GRACE_S = 3
_NAMESPACE = "share-compute"
_INVITE_LIFE_S = 3600.0
_SOUND_S = 60.0
"""A head that stood for so long is sound."""
_MOST_SHORT_LIVES = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    url: str
    api_key: str = field(repr=False)
    join_command: str = field(repr=False)
    """Ready to paste on a machine that is to join; works once, within the hour."""
    data_folder: Path
    ray_address: str

    @property
    def dashboard_url(self) -> str:
        """Opens the dashboard signed in; a browser does not send the part after # to anybody."""
        return f"{self.url}/#key={self.api_key}"


class _Heads:
    """The Ray head, and those that follow when it ends.

    Args:
        settings: where and how.
        roster: writes heads down, and ends the last one.
    """

    def __init__(self, settings: Settings, roster: Roster) -> None:
        self._settings = settings
        self._roster = roster
        self._began_s = 0.0
        self._short_lives = 0
        self.current = self._start()
        self.failure: ShareComputeError | None = None
        """Why there is no other one after the current one."""

    def _start(self) -> Head:
        head = start_head(self._settings, self._roster, _advertised(self._settings))
        self._began_s = time.monotonic()
        return head

    def revive(self) -> None:
        """Start another head in place of the current one, which ended; or say why not."""
        ended = self.current.node.child
        is_sound = time.monotonic() - self._began_s > _SOUND_S
        self._short_lives = 0 if is_sound else self._short_lives + 1
        try:
            self._require_hope(ended)
            _log.warning(
                "the Ray head ended with status %s; it is started again, and jobs go on", ended.exit_code
            )
            self._roster.stop(ended)
            self.current = self._start()
        except Exception as failure:  # noqa: BLE001 - the server ends with it
            self.failure = as_ours(failure)

    def _require_hope(self, ended: Child) -> None:
        if self._short_lives >= _MOST_SHORT_LIVES:
            raise Unavailable(
                f"the Ray head ended with status {ended.exit_code}, {self._short_lives} times soon after it stood, "
                "so the server ended too",
                mend="look for lack of memory or disk, then start it again with `share-compute up`: jobs continue",
                details={"log": ended.log_tail()},
            )


class _Server(uvicorn.Server):
    """Serves until it is told to end, or until it is connected to a Ray head that is not the current one."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, heads: _Heads, roster: Roster) -> None:
        super().__init__(config)
        self._app = app
        self._heads = heads
        self._head = heads.current.node.child
        self._roster = roster
        self._revival: threading.Thread | None = None

    async def on_tick(self, counter: int) -> bool:
        if counter % _WRITE_TICKS == 0:
            await asyncio.to_thread(self._roster.refresh)
        if self._revival is None and self._head.exit_code is not None:
            # First another head, then the end: calls that wait for Ray are answered by nobody else.
            self._revival = threading.Thread(target=self._heads.revive, name="revives-the-head", daemon=True)
            self._revival.start()
        is_replaced = self._revival is not None and not self._revival.is_alive()
        return await super().on_tick(counter) or is_replaced

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end_streams(self._app)  # else it waits for browsers that listen for events
        await super().shutdown(sockets)


def serve(
    settings: Settings,
    *,
    contribute: bool = False,
    progress: Callable[[str], None],
    announce: Callable[[Running], None],
) -> None:
    """Run a server until Ctrl-C or SIGTERM; whatever it started is gone when this returns or raises.

    Args:
        settings: where and how.
        contribute: whether this machine joins its own pool.
        progress: told what happens while it starts.
        announce: called once when it answers.

    Raises:
        Conflict: a port is taken, or another server uses the data folder.
        Unavailable: Ray, the database or the data folder cannot be used, or the head ended.
    """
    with Interrupts() as interrupts, ExitStack() as stack:
        stack.enter_context(locked(settings.data_folder))
        listener = stack.enter_context(_listen(settings.host, settings.port))
        url = f"http://{_for_url(_advertised(settings))}:{listener.getsockname()[1]}"
        store = _open_store(settings, stack)
        roster = open_run_folder(f"head of {settings.data_folder.resolve()}")
        interrupts.takes_along(roster)
        stack.callback(close_run_folder, roster)
        progress("starting the Ray head")
        heads, running = _Heads(settings, roster), None
        while heads.failure is None:
            head = heads.current
            with ExitStack() as connection:
                progress("connecting to it")
                _connect(head, connection)
                interrupts.install()
                if running is None:
                    running = _introduce(settings, store, url, head, stack)
                    if contribute:
                        _contribute(store, url, roster, settings)
                    announce(running)
                roster.refresh()
                try:
                    # A copy, since it is closed with the server: who asks meanwhile waits for an answer of the next.
                    _control_plane(settings, store, heads, roster).run(sockets=[listener.dup()])
                finally:
                    if heads.current is head:
                        interrupts.begin_stopping()
            if heads.current is head and heads.failure is None:
                return
        raise heads.failure


def _open_store(settings: Settings, stack: ExitStack) -> Store:
    try:
        upgrade(settings.resolved_database_url)
    except CommandError as failure:
        raise Conflict(
            f"this version of share-compute cannot read its database: {failure}",
            mend="install the newest version that ran with it, or choose another --data-folder",
        ) from failure
    store = Store(settings.resolved_database_url)
    stack.callback(store.close)
    store.hold()
    return store


def _introduce(settings: Settings, store: Store, url: str, head: Head, stack: ExitStack) -> Running:
    api_key = first_api_key(settings.data_folder, store)
    _, code = store.invites.create(label="printed at start", expires_in_s=_INVITE_LIFE_S)
    file = write_server_file(settings.data_folder, url)
    stack.callback(file.unlink, missing_ok=True)
    join = f"share-compute join {url} --invite {code}"
    return Running(url, api_key, join, settings.data_folder, head.ray_address)


def _control_plane(settings: Settings, store: Store, heads: _Heads, roster: Roster) -> _Server:
    head = heads.current
    cluster = ClusterInfo(
        ray_address=head.ray_address,
        token=head.token,
        head_node_id=head.node.node_id,
        advertise_address=_for_url(_advertised(settings)),
        environment=head.node_environment,
    )
    app = create_app(settings, store, cluster=cluster)
    logging.getLogger("share_compute_api").setLevel(settings.log_level.upper())
    config = uvicorn.Config(
        app,
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        access_log=settings.log_level == "debug",
        timeout_graceful_shutdown=_CONNECTIONS_GRACE_S,
    )
    return _Server(config, app, heads, roster)


def _connect(head: Head, stack: ExitStack) -> None:
    # Ray reads these when it is imported.
    os.environ.update(ray_environment(head.token, head.folder.parent))
    import ray

    stack.callback(ray.shutdown)
    ray.init(
        address=head.ray_address,
        namespace=_NAMESPACE,
        log_to_driver=False,
        logging_level=logging.WARNING,
        # Contributors' nodes may run on this machine too; these two pick the head's.
        _node_ip_address=head.node.address,
        _temp_dir=str(head.folder),
    )


def _contribute(store: Store, url: str, roster: Roster, settings: Settings) -> None:
    _, code = store.invites.create(label="this machine", expires_in_s=_INVITE_LIFE_S)
    command = own_command("join", url, "--name", f"{socket.gethostname().split('.')[0]}-server")
    # Arguments can be read by everybody on the machine, the environment cannot.
    roster.start("contribute", command, environment={"SHARE_COMPUTE_INVITE": code}, cwd=settings.data_folder)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except PermissionError as failure:
        raise UserError(
            f"port {port} needs more rights", mend="choose a port above 1023 with --port"
        ) from failure
    except (OSError, OverflowError) as failure:
        raise Conflict(
            f"cannot listen on {host} port {port}: {getattr(failure, 'strerror', None) or failure}",
            mend="end what uses it, or choose another one with --port (0 picks a free one)",
            details={"host": host, "port": port},
        ) from failure


def _advertised(settings: Settings) -> str:
    if settings.advertise_address:
        return settings.advertise_address
    try:
        if not ip_address(settings.host).is_unspecified:
            return settings.host
    except ValueError:
        return socket.gethostbyname(settings.host)
    return route_address("203.0.113.1")


def _for_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
