"""HTTP listener of the server: uvicorn with deadlines for slow clients, connection limits, and TLS.

uvicorn has no deadline for the head of a request, for a body, or for a client that does not read its response. It also
does not see a connection before the TLS handshake is done. So each connection first passes a `_Doorway`, which counts
it and makes the handshake. Then `_Guarded`, a subclass of uvicorn's HTTP/1.1 protocol, serves it with deadlines.

Deadlines do not count time in which the event loop was blocked, because the server did not read then (see
`ResponsiveClock`).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from contextlib import suppress
from enum import Enum
from typing import Any, Final

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from share_compute.settings import Settings
from share_compute_api.connection.connections import (
    ConnectionLimits,
    ConnectionTable,
    ResponsiveClock,
    is_loopback,
    is_within,
)

_BACKLOG: Final = 256
"""Length of the system's queue of connections that are not accepted yet."""
_MOST_FILES: Final = 1 << 16
"""Highest limit of open files to set. A higher one would slow child processes that loop over all descriptors."""
_FILES_FOR_OTHERS: Final = 512
"""Number of file descriptors reserved for uses other than connections; at most half of the limit of open files."""
_CHECKS: Final = 10
"""Minimum number of checks of a connection, and of iterations of the event loop, before a deadline passes. A TLS
handshake and the head of a request take about five iterations."""
_HANDSHAKE_S: Final = 600.0
"""Time limit of asyncio for a TLS handshake, in seconds. It counts time in which the event loop is blocked, too, so
`_Doorway.check` has the actual time limit."""
_SHUTDOWN_S: Final = 5.0
"""Time limit for a client to answer the TLS shutdown, in seconds."""
_TIMED_OUT: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as allowed, at most to `_MOST_FILES`; return the final limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as failure:
        _log.warning("the limit of open files stays %d: %s", soft, failure)
        return soft
    return wanted


def listener_config(
    app: FastAPI, settings: Settings, *, tls: ssl.SSLContext | None = None, **options: Any
) -> ListenerConfig:
    """Raise the limit of open files; return uvicorn's configuration for a control plane.

    Args:
        app: the application.
        settings: limits of connections and addresses of reverse proxies.
        tls: certificate and key of the server; None for plain HTTP.
        options: further options of `uvicorn.Config`, such as the port.
    """
    return ListenerConfig(app, settings, raise_file_limit(), tls, **options)


class ListenerConfig(uvicorn.Config):
    """uvicorn's configuration with a table of connections."""

    def __init__(
        self, app: FastAPI, settings: Settings, most_files: int, tls: ssl.SSLContext | None, **options: Any
    ) -> None:
        proxies = settings.proxies
        limits = ConnectionLimits(
            connections=min(settings.max_connections, max(most_files - _FILES_FOR_OTHERS, most_files // 2)),
            half_open_per_address=settings.half_open_per_address,
            head_s=settings.request_head_s,
            stall_s=settings.stall_s,
            least_bytes_per_s=settings.least_bytes_per_s,
        )
        super().__init__(
            app,
            http=_Doorway,
            ws="none",
            # transports of uvloop, which uvicorn prefers if it is installed, are not instances of asyncio.Transport
            loop="asyncio",
            backlog=_BACKLOG,
            # At `limits.connections`, `ConnectionTable` closes an idle or half-open connection for each new one.
            # uvicorn reaches its own limit, and answers 503, only if all connections are busy.
            limit_concurrency=limits.connections + 1,
            timeout_keep_alive=settings.keep_alive_s,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
            server_header=False,
            **options,
        )
        self.tls = tls
        self.table = ConnectionTable(limits, lambda peer: is_loopback(peer) or is_within(peer, proxies))
        self._sweep: asyncio.TimerHandle | None = None
        self._period_s = min(1.0, limits.head_s / _CHECKS, limits.stall_s / _CHECKS)
        self._clock = ResponsiveClock(0.0, most_s=self._period_s)

    def now_s(self, loop: asyncio.AbstractEventLoop) -> float:
        """Return the time for measuring clients' deadlines, in seconds."""
        return self._clock.read(loop.time())

    def begin_sweeping(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check all connections for slow clients periodically, as long as any connection is open."""
        if self._sweep is None:
            self._clock.tick(loop.time())
            self._sweep = loop.call_later(self._period_s, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep = None
        self.table.check(self._clock.tick(loop.time()))
        if len(self.table):
            self.begin_sweeping(loop)


class _Doorway(asyncio.Protocol):
    """First protocol of a connection: counts the connection and makes its TLS handshake within ``head_s``."""

    def __init__(
        self,
        config: ListenerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._began_s = config.now_s(self._loop)
        self._early = bytearray()
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection or abort it; then pass it to `_Guarded` (plain HTTP) or start the TLS handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        if not self._config.table.admit(self, str(peer[0]) if peer else ""):
            transport.abort()
            return
        self._config.begin_sweeping(self._loop)
        if self._config.tls is None:
            self._pass_on(transport)
            return
        # On shutdown, uvicorn closes all connections in this set.
        self._state.connections.add(self)  # type: ignore[arg-type]
        transport.pause_reading()
        self._handshake = self._loop.create_task(self._shake_hands(transport, self._config.tls))

    async def _shake_hands(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        if (
            transport.is_closing()
        ):  # asyncio would keep the handshake of a closed connection until `_HANDSHAKE_S`
            return
        try:
            secure = await self._loop.start_tls(
                transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=_HANDSHAKE_S,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:  # includes `ssl.SSLError`
            self.shutdown()
            return
        self._state.connections.discard(self)
        if secure is None or secure.is_closing():
            self.shutdown()
        else:
            self._pass_on(secure)

    def _pass_on(self, transport: asyncio.Transport) -> None:
        assert self._transport is not None
        guarded = _Guarded(
            self._config, self._state, self._app_state, self._loop, self._transport, self._began_s
        )
        self._config.table.replace(self, guarded)
        transport.set_protocol(guarded)
        guarded.connection_made(transport)
        if self._early:
            guarded.data_received(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        """Buffer data that arrives before `_Guarded` receives the connection."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the table."""
        del exc
        self._config.table.forget(self)

    def check(self, now_s: float) -> None:
        """Close the connection if its time limit for the handshake has passed."""
        if now_s - self._began_s > self._config.table.limits.head_s:
            self.shutdown()

    def drop(self) -> None:
        """Close the connection."""
        self.shutdown()

    def shutdown(self) -> None:
        """Close the connection; uvicorn calls this when the server shuts down."""
        self._state.connections.discard(self)
        self._config.table.forget(self)
        if self._transport is not None:
            self._transport.abort()


class _Phase(Enum):
    head = "the head of a request is awaited"
    body = "its body is awaited"
    answer = "it is answered"
    idle = "the next request is awaited"


class _Guarded(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with deadlines.

    - The head of a request must be complete within `head_s`. The time begins with the connection. On a connection that
      was kept alive, it begins with the first byte of the request.
    - A client must send a body, and read a response, at `least_bytes_per_s` or more on average over each period of
      `stall_s`. Time in which the server itself does not read or has nothing to send (an event stream) does not count.
    """

    def __init__(
        self,
        config: ListenerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        raw: asyncio.Transport,
        began_s: float,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._listener = config
        self._table = config.table
        self._raw = raw
        self._phase = _Phase.head
        self._head_began_s = began_s
        self._received_bytes = 0
        self._reading = (began_s, 0)
        """(Start of the current period of reading in seconds, bytes received before that time)."""
        self._writing: tuple[float, int] | None = None
        """(Start of the current period of writing in seconds, bytes unsent at that time); None if all are sent."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        super().data_received(data)
        self._enter(_Phase.head if self.conn.their_state is h11.IDLE else self._phase_of_request())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._enter(_Phase.head if self.conn.trailing_data[0] else _Phase.idle)
        else:
            self._enter(self._phase_of_request())

    def _phase_of_request(self) -> _Phase:
        return _Phase.body if self.conn.their_state is h11.SEND_BODY else _Phase.answer

    def _enter(self, phase: _Phase) -> None:
        if phase is self._phase:
            return
        now_s = self._listener.now_s(self.loop)
        if phase is _Phase.head:
            self._head_began_s = now_s
            self._table.half_open(self)
        elif phase is _Phase.idle:
            self._table.idle(self)
        elif self._phase in (_Phase.head, _Phase.idle):
            self._table.busy(self)
        self._reading = (now_s, self._received_bytes)
        self._phase = phase

    def check(self, now_s: float) -> None:
        """Close the connection if its client is too slow."""
        if self._phase is _Phase.head and now_s - self._head_began_s > self._table.limits.head_s:
            self._refuse_head()
        elif self._phase is _Phase.body and self._reads_too_slowly(now_s):
            self.transport.abort()
        if self._writes_too_slowly(now_s):
            self.transport.abort()

    def drop(self) -> None:
        """Close a half-open or idle connection."""
        self.transport.abort()

    def _refuse_head(self) -> None:
        if self.transport.is_closing():
            return
        if self._received_bytes:
            with suppress(OSError):
                self.transport.write(_TIMED_OUT)
        self.transport.close()

    def _reads_too_slowly(self, now_s: float) -> bool:
        began_s, received_bytes = self._reading
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._reading = (now_s, self._received_bytes)
        elif now_s - began_s >= self._table.limits.stall_s:
            self._reading = (now_s, self._received_bytes)
            return self._is_too_little(self._received_bytes - received_bytes)
        return False

    def _writes_too_slowly(self, now_s: float) -> bool:
        unsent_bytes = 0
        if self.flow.write_paused or self.transport.is_closing():
            unsent_bytes = self._raw.get_write_buffer_size()
            if self.transport is not self._raw:
                unsent_bytes += self.transport.get_write_buffer_size()
        if unsent_bytes == 0:
            self._writing = None
        elif self._writing is None:
            self._writing = (now_s, unsent_bytes)
        elif now_s - self._writing[0] >= self._table.limits.stall_s:
            before_bytes = self._writing[1]
            self._writing = (now_s, unsent_bytes)
            return self._is_too_little(before_bytes - unsent_bytes)
        return False

    def _is_too_little(self, moved_bytes: int) -> bool:
        return moved_bytes < self._table.limits.least_bytes_per_s * self._table.limits.stall_s
