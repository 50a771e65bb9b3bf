"""A server whose event loop is slow does not close connections of clients that were in time."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from tests.api.conftest import wait_until
from tests.security.certificates import trusting_context

from share_compute.settings import Settings
from share_compute_api.connection.certificates import server_certificate
from share_compute_api.connection.connections import ResponsiveClock
from share_compute_api.connection.listening import listener_config

HEAD_S = 0.3
SETTINGS = Settings(request_head_s=HEAD_S)
BLOCKED_S = 0.36
"""Time that each iteration of the server's event loop takes; longer than a client may take for the head."""
CLIENTS = 20
DEADLINE_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    certificate = server_certificate(Settings(data_folder=tmp_path, tls="self-signed"), "192.0.2.1")
    assert certificate is not None
    return certificate.context


@contextmanager
def overloaded_server(tls: ssl.SSLContext | None, settings: Settings = SETTINGS) -> Iterator[int]:
    """Run a server each iteration of whose event loop takes `BLOCKED_S`; yield its port."""
    app = FastAPI()
    app.add_api_route("/", _answer)
    listening = socket.create_server(("127.0.0.1", 0))
    stopped, never = threading.Event(), threading.Event()

    async def serve() -> None:
        config = listener_config(app, settings, tls=tls, log_level="warning")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not stopped.is_set():
            never.wait(BLOCKED_S)
            await asyncio.sleep(1e-6)  # a timer: the check of connections then runs in every iteration, too
        server.should_exit = True
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        stopped.set()
        thread.join(DEADLINE_S)


async def _answer() -> dict[str, str]:
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("is_secure", [False, True], ids=["http", "https"])
def test_requests_sent_in_time_are_answered_however_slow_the_loop_is(
    tls: ssl.SSLContext, is_secure: bool
) -> None:
    with overloaded_server(tls if is_secure else None) as port, ExitStack() as stack:

        def connect() -> socket.socket:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))
            if is_secure:
                client = stack.enter_context(trusting_context().wrap_socket(client))
            client.sendall(REQUEST)
            return client

        first = connect()
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        # The server already checks connections when the others come, because the first one stays open.
        for client in [connect() for _ in range(3 if is_secure else CLIENTS)]:
            assert client.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_client_that_sends_nothing_is_closed_although_the_loop_is_slow() -> None:
    with overloaded_server(None) as port, socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        assert client.recv(1) == b""


@pytest.mark.slow
def test_connections_that_are_dropped_before_their_handshake_leave_nothing(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, protocol = list[weakref.ref[Any]](), asyncio.sslproto.SSLProtocol
    begin = protocol.__init__

    def counted(each: Any, *arguments: Any, **options: Any) -> None:
        made.append(weakref.ref(each))
        begin(each, *arguments, **options)

    def handshakes() -> int:
        """Return the number of TLS connections of this test that are not freed."""
        gc.collect()
        return sum(each() is not None for each in made)

    # Other tests of this process may have connections, too.
    monkeypatch.setattr(protocol, "__init__", counted)
    settings = Settings(max_connections=40)  # of which an address may have 20 that are half-open
    with overloaded_server(tls, settings) as port:
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_S))
            wait_until(lambda: 1 <= handshakes() <= 32)
        wait_until(lambda: made and handshakes() == 0)


def test_the_clock_counts_a_limited_part_of_each_interval() -> None:
    clock = ResponsiveClock(100.0, most_s=1.0)
    assert clock.read(100.5) == 0.5
    assert clock.read(130.0) == 1.0
    assert clock.tick(130.0) == 1.0
    assert clock.tick(130.25) == 1.25
    assert clock.read(131.0) == 2.0
