"""Connections that wait to retransmit after a network cut: those of Ray are closed, and others are left alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from tests.conftest import wait_for
from tests.hosts.network import Host, Network, why_not

from share_compute_actors.machine.stalled import close_stalled

PORT = 7100
ANSWERED_S = 60.0
USER_TIMEOUT_MS = 120_000
"""The value that gRPC sets on connections of Ray."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Network() as network:
        yield network.add(), network.add()


@contextmanager
def connected(here: Host, there: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection; the first end has the timeout that marks connections of gRPC."""
    with closing(there.open_socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((there.address, PORT))
        listener.listen()
        near = here.open_socket()
        near.settimeout(ANSWERED_S)
        near.connect((there.address, PORT))
        far, _ = listener.accept()
        far.settimeout(ANSWERED_S)
        with near, far:
            yield near, far


def has_ended(connection: socket.socket) -> bool:
    return connection.recv(1) == b""


@pytest.mark.parametrize("side", ["caller", "listener"])
def test_a_stalled_connection_is_closed_once_the_other_host_answers(
    hosts: tuple[Host, Host], side: str
) -> None:
    here, there = hosts
    with ExitStack() as stack:
        caller, listener = stack.enter_context(connected(here, there))
        host, end = (here, caller) if side == "caller" else (there, listener)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        # Otherwise TCP could send the data again after the cut, before the connection is closed.
        stack.enter_context(host.losing(end))
        with here.cut_from([there]):
            end.sendall(b"lost")
            wait_for(lambda: _losses(end) >= 3, "lost packets")
            assert host.call(close_stalled) == 0, "nothing answers yet"
        wait_for(lambda: host.call(close_stalled) == 1, "the end of the connection")
        assert has_ended(end)


def test_other_connections_are_left_alone(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with connected(here, there) as (caller, listener):
        with here.cut_from([there]):
            caller.sendall(b"late")
            wait_for(lambda: _losses(caller) >= 3, "lost packets")
        assert here.call(close_stalled) == 0
        assert listener.recv(4) == b"late"


def test_a_connection_without_losses_stays(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with connected(here, there) as (caller, listener):
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        caller.sendall(b"here")
        assert listener.recv(4) == b"here"
        assert here.call(close_stalled) == 0
        caller.sendall(b"more")
        assert listener.recv(4) == b"more"


def _losses(connection: socket.socket) -> int:
    """Return the number of packets lost since the last acknowledgement, from Linux's ``struct tcp_info``."""
    return max(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)[2:])
