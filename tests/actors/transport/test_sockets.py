"""Duplicates of gloo's connections, of which each is closed unless it is kept."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from share_compute_actors.transport.collective.sockets import duplicated

Address = tuple[str, int]


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, Address, Address]]:
    """A TCP connection with its own address and that of its peer."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        own = stack.enter_context(socket.create_connection(server.getsockname()))
        stack.enter_context(closing(server.accept()[0]))
        yield own, own.getsockname(), own.getpeername()


def test_a_connection_is_duplicated(connection: tuple[socket.socket, Address, Address]) -> None:
    own, here, there = connection
    held = duplicated(own.fileno(), here, there)
    assert held is not None
    with held.socket:
        assert held.socket.fileno() != own.fileno()
        assert held.is_open()
        own.close()
        assert not held.is_open()


@pytest.mark.parametrize(
    "reused_for", ["nothing", "file", "pipe", "unix socket", "unconnected", "connection"]
)
def test_a_descriptor_that_was_reused_leaves_nothing_open(
    connection: tuple[socket.socket, Address, Address], tmp_path: Path, reused_for: str
) -> None:
    own, here, there = connection
    with ExitStack() as stack:
        match reused_for:
            case "nothing":
                descriptor = os.dup(own.fileno())
                os.close(descriptor)
            case "file":
                descriptor = stack.enter_context((tmp_path / "file").open("w")).fileno()
            case "pipe":
                descriptor, other = os.pipe()
                stack.callback(os.close, descriptor)
                stack.callback(os.close, other)
            case "unix socket":
                descriptor, _ = (stack.enter_context(one).fileno() for one in socket.socketpair())
            case "unconnected":
                descriptor = stack.enter_context(socket.socket()).fileno()
            case _:
                descriptor, here, there = own.fileno(), there, here
        before = psutil.Process().num_fds()
        assert duplicated(descriptor, here, there) is None
        assert psutil.Process().num_fds() == before
