"""The server: starts and ends a Ray head and the control plane together.

The head starts first, and the control plane imports its packages meanwhile, because each takes seconds. So the top of
this module imports only modules that the head needs.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from share_compute.errors import Conflict, UserError
from share_compute.program import collecting_later
from share_compute.settings import Settings
from share_compute.store.records import AT_START, THIS_MACHINE
from share_compute_actors.machine.processes import ChildProcesses
from share_compute_actors.machine.run_folders import close_run_folder, open_run_folder
from share_compute_api.app.fencing import ends_within_grace
from share_compute_api.cluster.cluster import Cluster, for_url
from share_compute_api.connection.addresses import address_in_url, address_warnings
from share_compute_api.connection.data_folder import first_api_key, locked, write_server_file
from share_compute_api.connection.fingerprints import join_invite
from share_compute_api.connection.join_line import INVITE_VARIABLE, join_command
from share_compute_api.submission.data_roots import require_folders
from share_compute_api.terminal.children import Interrupts, own_command

if TYPE_CHECKING:
    from fastapi import FastAPI

    from share_compute.store import Store
    from share_compute_api.connection.certificates import ServerCertificate
    from share_compute_api.server.context import Context

_WRITE_TICKS = 100
"""Number of uvicorn's ticks (0.1 s each) between updates of the list of child processes.

Ray may start further processes at any time."""
_POLL_S = 0.1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Running:
    """Facts about a running server, for the operator."""

    url: str
    fingerprint: str | None
    """Fingerprint of the server's TLS key; None for plain HTTP, or a certificate that an authority signed."""
    warnings: tuple[str, ...]
    """Warnings about the server's settings and certificate."""
    code: str = field(repr=False)
    """One-time code that signs a browser in; valid for 15 minutes."""
    join_command: str = field(repr=False)
    """Command that makes a machine join; its invite works for one machine, and expires."""
    data_folder: Path
    ray_address: str

    @property
    def dashboard_url(self) -> str:
        """URL that signs a browser in to the dashboard. Browsers do not send the part after # (the code) to servers."""
        return f"{self.url}/#code={self.code}"


class _Server(uvicorn.Server):
    """uvicorn server that also ends when another server takes over its database."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, children: ChildProcesses, store: Store) -> None:
        super().__init__(config)
        self._store = store
        self._app = app
        self._children = children

    async def on_tick(self, counter: int) -> bool:
        if counter % _WRITE_TICKS == 0:
            await asyncio.to_thread(self._children.refresh)
        if self._store.fenced is not None:
            self.force_exit = True  # open requests can no longer write to the database
        return await super().on_tick(counter) or self.force_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        from share_compute_api.app.app import end_streams

        end_streams(self._app)  # otherwise uvicorn waits for open event streams
        await super().shutdown(sockets)


def serve(
    settings: Settings,
    *,
    contribute: bool = False,
    progress: Callable[[str], None],
    announce: Callable[[Running], None],
) -> None:
    """Run a server until Ctrl-C or SIGTERM; all child processes have ended when this function returns or raises.

    Args:
        settings: configuration of the server.
        contribute: whether this machine joins its own cluster.
        progress: called with a description of each phase while the server starts.
        announce: called once, when the port is open, just before the first request is answered.

    Raises:
        Conflict: a port is taken, another server uses the data folder or the database, the database has a newer
            schema, or a data root contains the data folder.
        Unavailable: Ray, the database or the data folder cannot be used.
        UserError: a setting is invalid, for example a data root that is not a folder.
        Fenced: another server took over the database.
    """
    require_folders(settings)
    with Interrupts() as interrupts, ExitStack() as stack:
        stack.enter_context(locked(settings.data_folder))
        listener = stack.enter_context(_listen(settings.host, settings.port))
        address, port = for_url(address_in_url(settings)), listener.getsockname()[1]
        # The database stays locked until the head has ended.
        locks = stack.enter_context(ExitStack())
        children = open_run_folder(f"head of {settings.data_folder.resolve()}")
        interrupts.takes_along(children)
        stack.callback(close_run_folder, children)
        progress("starting the Ray head")
        with _starting_cluster(settings, children) as starting:
            with collecting_later():
                from share_compute_api.app.app import create_app
                from share_compute_api.connection.certificates import server_certificate

                certificate = server_certificate(settings, address)
                store = _open_store(settings, locks)
                store.on_fenced(ends_within_grace(children))
                app = create_app(settings, store, fingerprint=_pin(settings, certificate))
            context: Context = app.state.context
            cluster = context.cluster = starting.result()
        url = f"{'http' if certificate is None else 'https'}://{address}:{port}"
        running = _introduce(app, url, certificate, cluster, stack)
        if contribute:
            _contribute(store, running, children, settings)
        announce(running)
        children.refresh()
        try:
            _control_plane(app, certificate, children).run(sockets=[listener])
        finally:
            interrupts.begin_stopping()
        if store.fenced is not None:
            raise store.fenced


@contextmanager
def _starting_cluster(settings: Settings, children: ChildProcesses) -> Iterator[Future[Cluster]]:
    """Start the cluster in a second thread; when the block fails, end its processes."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="starts-cluster") as second_thread:
        starting = second_thread.submit(Cluster, settings, children)
        try:
            yield starting
        except BaseException:
            # The second thread ends when the head that it waits for has ended. It may not have started the head yet.
            while not starting.done():
                children.stop_all(grace_s=0)
                wait([starting], timeout=_POLL_S)
            raise


def _open_store(settings: Settings, stack: ExitStack) -> Store:
    from share_compute.store import Store
    from share_compute.store.database.backups import FOLDER, prepare

    store = Store(settings.resolved_database_url)
    stack.callback(store.close)
    store.lock()  # Lock the database first, so that no other server uses it while the schema changes.
    prepare(settings.resolved_database_url, settings.data_folder / FOLDER, store.clock())
    store.hold()
    return store


def _introduce(
    app: FastAPI, url: str, certificate: ServerCertificate | None, cluster: Cluster, stack: ExitStack
) -> Running:
    from share_compute_api.connection.certificates import start_warnings

    context: Context = app.state.context
    settings, store = context.settings, context.store
    key = store.keys.verify(first_api_key(settings.data_folder, store))
    assert key is not None
    sign_in, _ = context.codes.make(key.id, store.clock())
    _, code = store.invites.create(label=AT_START, expires_in_s=settings.invite_life_s, replaces=True)
    fingerprint = certificate.fingerprint if certificate else None
    file = write_server_file(settings.data_folder, url, fingerprint)
    stack.callback(file.unlink, missing_ok=True)
    invite = join_invite(code, context.fingerprint)
    join = join_command(settings.public_url or url, invite, insecure=settings.insecure)
    return Running(
        url=url,
        fingerprint=fingerprint,
        warnings=(*start_warnings(settings, certificate), *address_warnings(settings)),
        code=sign_in,
        join_command=join,
        data_folder=settings.data_folder,
        ray_address=cluster.info.ray_address,
    )


def _pin(settings: Settings, certificate: ServerCertificate | None) -> str | None:
    """Return the key's fingerprint for invites; None if clients do not need it, for example behind a proxy."""
    return certificate.fingerprint if certificate and settings.public_url is None else None


def _control_plane(app: FastAPI, certificate: ServerCertificate | None, children: ChildProcesses) -> _Server:
    from share_compute_api.connection.listening import listener_config

    context: Context = app.state.context
    settings = context.settings
    logging.getLogger("share_compute_api").setLevel(settings.log_level.upper())
    config = listener_config(
        app,
        settings,
        tls=certificate.context if certificate else None,
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        access_log=settings.log_level == "debug",
        timeout_graceful_shutdown=settings.shutdown_grace_s,
    )
    return _Server(config, app, children, context.store)


def _contribute(store: Store, running: Running, children: ChildProcesses, settings: Settings) -> None:
    _, code = store.invites.create(label=THIS_MACHINE, expires_in_s=settings.invite_life_s, replaces=True)
    command = own_command("join", running.url, "--name", f"{socket.gethostname().split('.')[0]}-server")
    # Other users of the machine can read command arguments, but not the environment.
    environment = {
        INVITE_VARIABLE: join_invite(code, running.fingerprint),
        "SHARE_COMPUTE_DATA_FOLDER": str(settings.data_folder),
    }
    children.start("contribute", command, environment=environment, cwd=settings.data_folder)


def _listen(host: str, port: int) -> socket.socket:
    try:
        if host:
            socket.getaddrinfo(host, None)  # `create_server` hides its error
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
    except PermissionError as failure:
        raise UserError(
            f"port {port} needs more rights", hint="choose a port above 1023 with --port"
        ) from failure
    except socket.gaierror as failure:
        raise UserError(
            f"--host: no address belongs to the name {host!r}",
            hint="give an address or a name of this machine; 0.0.0.0 is all of its addresses",
        ) from failure
    except (OSError, OverflowError) as failure:
        raise Conflict(
            f"cannot listen on {host} port {port}: {getattr(failure, 'strerror', None) or failure}",
            hint="end the program that uses it, or choose another --port (0 picks a free one)",
            details={"host": host, "port": port},
        ) from failure
    # asyncio sets TCP_NODELAY only on sockets that were made with an explicit protocol. Without it the second write of
    # an answer waits for the client's delayed acknowledgement (40 ms).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
