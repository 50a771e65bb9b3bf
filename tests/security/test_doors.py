"""Clients that send half a request, send slowly, or do not read, while others want to be served."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from tests.api.conftest import Plane, wait_until
from tests.security.planes import open_plane

from share_compute.settings import Settings
from share_compute_api.connection.connections import (
    ConnectionLimits,
    ConnectionTable,
    address_group,
    is_loopback,
)
from share_compute_api.connection.listening import raise_file_limit

HALF = b"GET /api/v1/health HTTP/1.1\r\nHost: a\r\nX-"
DEADLINE_S = 60.0


def connect(plane: Plane, sent: bytes = HALF) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", plane.server.port), timeout=DEADLINE_S)
    client.sendall(sent)
    return client


def is_healthy(plane: Plane) -> bool:
    return httpx.get(f"{plane.url}/api/v1/health", timeout=DEADLINE_S).status_code == 200


def is_closed(client: socket.socket) -> bool:
    """Whether the server closed the connection."""
    client.setblocking(False)  # noqa: FBT003
    try:
        while client.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        client.settimeout(DEADLINE_S)
    return True


def until_closed(client: socket.socket) -> bytes:
    """Return all bytes that the server sends until it closes the connection; fail if it does not."""
    received = b""
    with client, suppress(ConnectionError):
        while part := client.recv(65536):
            received += part
    return received


@contextmanager
def flood(plane: Plane, count: int, sent: bytes = HALF) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connect(plane, sent)) for _ in range(count)]


@pytest.mark.parametrize("sent", [b"", HALF], ids=["silent", "half-sent"])
def test_half_sent_requests_do_not_keep_others_out(tmp_path: Path, sent: bytes) -> None:
    with open_plane(tmp_path, max_connections=128, request_head_s=DEADLINE_S) as plane:
        with flood(plane, 600, sent) as clients:
            assert is_healthy(plane)
            wait_until(lambda: sum(not is_closed(client) for client in clients) <= 128)
            # The oldest connections were closed, and the newest ones may still send the rest.
            assert is_closed(clients[0])
            clients[-1].sendall((HALF if not sent else b"") + b"a: b\r\n\r\n")
            assert clients[-1].recv(100).startswith(b"HTTP/1.1 200")
        assert is_healthy(plane)


@pytest.mark.slow
def test_half_sent_requests_with_few_descriptors(tmp_path: Path) -> None:
    """The server may open 512 files only: before, 480 half-sent requests used up all of them."""
    program = tmp_path / "limited.py"
    program.write_text(
        "import resource, sys\n"
        "from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "from tests.security.planes import open_plane\n"
        "with open_plane(Path(sys.argv[1])) as plane:\n"
        "    print(plane.server.port, flush=True)\n"
        "    sys.stdin.read()\n",
        encoding="utf-8",
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, program, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    with process, ExitStack() as stack:
        assert process.stdin is not None
        assert process.stdout is not None
        stack.callback(process.stdin.close)
        port = int(process.stdout.readline())
        for _ in range(600):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))
            client.sendall(HALF)
        assert httpx.get(f"http://127.0.0.1:{port}/api/v1/health", timeout=DEADLINE_S).status_code == 200


def test_a_head_that_does_not_come_in_time_ends_the_connection(tmp_path: Path) -> None:
    with open_plane(tmp_path, request_head_s=0.2) as plane:
        assert until_closed(connect(plane)).startswith(b"HTTP/1.1 408")
        assert until_closed(connect(plane, b"")) == b""


def test_a_connection_that_is_kept_alive_has_the_same_deadline(tmp_path: Path) -> None:
    with open_plane(tmp_path, request_head_s=0.2) as plane:
        client = connect(plane, b"GET /api/v1/health HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        while b"}" not in answer:
            answer += client.recv(65536)
        client.sendall(b"G")  # uvicorn stops its own timer at the first byte
        assert until_closed(client).startswith(b"HTTP/1.1 408")


def begin_upload(plane: Plane) -> tuple[str, str]:
    headers = {"Authorization": f"Bearer {plane.api_key}"}
    made = httpx.post(f"{plane.url}/api/v1/uploads", json={"name": "rows", "kind": "data"}, headers=headers)
    upload = made.json()["id"]
    head = (
        f"PUT /api/v1/uploads/{upload}/files/rows.jsonl HTTP/1.1\r\nHost: a\r\n"
        f"Authorization: Bearer {plane.api_key}\r\nContent-Length: {{}}\r\n\r\n"
    )
    return upload, head


def test_a_body_that_stands_still_ends_the_connection(tmp_path: Path) -> None:
    with open_plane(tmp_path, stall_s=0.2) as plane:
        _, head = begin_upload(plane)
        client = connect(plane, head.format(10_000).encode() + b"{")
        assert b"200" not in until_closed(client)
        assert is_healthy(plane)


def test_a_body_that_comes_slowly_but_steadily_arrives(tmp_path: Path) -> None:
    row = b'{"text": "abcdefgh"}\n'
    with open_plane(tmp_path, stall_s=0.5, least_bytes_per_s=100) as plane:
        _, head = begin_upload(plane)
        with connect(plane, head.format(60 * len(row)).encode()) as client:
            tick = threading.Event()
            for _ in range(60):
                client.sendall(row)
                tick.wait(0.03)  # 700 bytes/s, for longer than three periods
            assert client.recv(100).startswith(b"HTTP/1.1 20"), "the upload was cut"


def test_a_client_that_does_not_read_its_answer_is_cut(tmp_path: Path) -> None:
    with open_plane(tmp_path, stall_s=0.3) as plane:
        request = (
            f"GET /api/v1/openapi.json HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {plane.api_key}\r\n\r\n"
        )
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", plane.server.port))
        with client, pytest.raises(ConnectionError):  # noqa: PT012
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:  # without ever reading
                client.sendall(request.encode())


def test_an_event_stream_without_events_stays_open(tmp_path: Path) -> None:
    with open_plane(tmp_path, request_head_s=0.2, stall_s=0.2, keep_alive_s=1) as plane:
        headers = {"Authorization": f"Bearer {plane.api_key}"}
        url = f"{plane.url}/api/v1/events"
        with httpx.stream("GET", url, headers=headers, timeout=DEADLINE_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert until_closed(connect(plane)).startswith(b"HTTP/1.1 408")  # deadlines pass meanwhile
            assert until_closed(connect(plane)).startswith(b"HTTP/1.1 408")
            plane.store.events.record("alerts", {})
            assert any(line == "event: alerts" for line in lines)


class Waiting:
    """A connection of the table."""

    def __init__(self) -> None:
        self.dropped = False

    def check(self, now_s: float) -> None:
        del now_s

    def drop(self) -> None:
        self.dropped = True


LIMITS = ConnectionLimits(connections=40, half_open_per_address=4, head_s=1, stall_s=1, least_bytes_per_s=1)


def admitted(table: ConnectionTable, address: str, count: int) -> list[Waiting]:
    waiting = [Waiting() for _ in range(count)]
    assert all(table.admit(one, address) for one in waiting)
    return waiting


def test_an_address_has_so_many_half_open_connections() -> None:
    table = ConnectionTable(LIMITS, is_loopback)
    others = admitted(table, "192.0.2.1", 2)
    many = admitted(table, "192.0.2.2", 10)
    assert [one.dropped for one in many] == [True] * 6 + [False] * 4
    assert not any(one.dropped for one in others + admitted(table, "127.0.0.1", 20))
    for one in many[6:]:
        table.busy(one)
    admitted(table, "192.0.2.2", 4)
    assert not any(one.dropped for one in many[6:])


def test_addresses_of_one_network_count_as_one() -> None:
    table = ConnectionTable(LIMITS, is_loopback)
    many = [admitted(table, f"2001:db8::{index:x}", 1)[0] for index in range(10)]
    assert sum(one.dropped for one in many) == 6
    assert address_group("::ffff:192.0.2.1") == address_group("192.0.2.1")


def test_a_full_table_drops_idle_ones_first_then_those_of_the_address_with_most() -> None:
    table = ConnectionTable(LIMITS, lambda address: address.startswith("198."))
    busy = admitted(table, "192.0.2.1", 1)[0]
    table.busy(busy)
    idle = admitted(table, "192.0.2.2", 1)[0]
    table.busy(idle)
    table.idle(idle)
    lone = admitted(table, "192.0.2.3", 1)[0]
    proxied = admitted(table, "198.51.100.1", 20)
    for index in range(17):
        admitted(table, f"203.0.113.{index}", 1)
    assert len(table) == 40
    assert not idle.dropped
    admitted(table, "192.0.2.9", 1)
    assert idle.dropped
    admitted(table, "192.0.2.10", 1)
    assert [one.dropped for one in proxied].index(False) == 1
    assert not lone.dropped
    assert not busy.dropped


def test_a_table_of_busy_connections_keeps_them_and_has_a_few_to_spare() -> None:
    table = ConnectionTable(LIMITS, is_loopback)
    busy: list[Waiting] = []
    while table.admit(one := Waiting(), "192.0.2.1"):
        table.busy(one)
        busy.append(one)
    assert len(busy) == 104
    assert not any(one.dropped for one in busy)
    table.forget(busy[0])
    assert table.admit(Waiting(), "192.0.2.1")


def test_more_requests_than_allowed_are_refused_and_served_when_others_end(tmp_path: Path) -> None:
    with open_plane(tmp_path, max_connections=16) as plane:
        headers = {"Authorization": f"Bearer {plane.api_key}"}
        url = f"{plane.url}/api/v1/events"
        with ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(timeout=DEADLINE_S)) for _ in range(20)]
            answers = [stack.enter_context(client.stream("GET", url, headers=headers)) for client in clients]
            assert [answer.status_code for answer in answers] == [200] * 16 + [503] * 4
        wait_until(lambda: is_healthy(plane))


def test_the_limit_of_open_files_is_raised() -> None:
    code = (
        "import resource\n"
        "from share_compute_api.connection.listening import raise_file_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    raised, soft, hard = map(int, done.stdout.split())
    assert raised == soft == (min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16)
    assert raise_file_limit() >= 256


def test_only_configured_proxies_are_believed(tmp_path: Path) -> None:
    headers = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.7", "Sec-Fetch-Site": "same-origin"}
    for proxies, is_believed in (("", False), ("192.0.2.0/24", False), ("127.0.0.0/8, ::1", True)):
        with open_plane(tmp_path / str(len(proxies)), proxy_addresses=proxies) as plane:
            body = {"key": plane.api_key}
            answer = httpx.post(f"{plane.url}/api/v1/session", json=body, headers=headers)
            assert ("Secure" in answer.headers["set-cookie"]) is is_believed


def test_a_proxy_must_be_an_address() -> None:
    with pytest.raises(ValueError, match=r"proxy\.example"):
        Settings(proxy_addresses="192.0.2.1, proxy.example")
