"""Hosts in network namespaces, with plain sockets: firewalls, NAT, second addresses, delays, rates and cuts."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.conftest import wait_for
from tests.hosts.network import Direction, Host, Network, why_not
from tests.hosts.shim import LIMIT, Line
from tests.ray_nodes import title

UNANSWERED_S = 0.3
"""Time to wait for a packet that must not arrive. Packets between namespaces take far less than a millisecond."""
ANSWERED_S = 60.0
"""Time limit for a packet that must arrive, however busy the machine is."""
OVERTAKEN_S = 0.5
"""Delay of a packet that another one overtakes; ARP gives up when a round trip takes three seconds."""
PORT = 7000
ALL = "0.0.0.0"
OWN_NETWORK, DEVICES = Path("/proc/thread-self/ns/net"), Path("/sys/class/net")


@dataclass
class Hosts:
    """A network and its hosts, to which a test may add firewalls, delays and cuts while it runs."""

    network: Network
    plain: Host
    other: Host
    third: Host
    natted: Host
    two: Host


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Network() as network:
        plain = [network.add() for _ in range(3)]
        natted, two = network.add(behind_nat=True), network.add(second_address=True)
        yield Hosts(network, *plain, natted, two)


@contextmanager
def listening(host: Host, port: int = PORT) -> Iterator[socket.socket]:
    with closing(host.open_socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(ANSWERED_S)
        listener.bind((ALL, port))
        listener.listen()
        yield listener


def reaches(host: Host, address: str, port: int = PORT, *, wanted: bool = True) -> bool:
    """Return whether a connection from a host to an address can be made; ``wanted`` decides how long it may take."""
    with closing(host.open_socket()) as caller:
        caller.settimeout(ANSWERED_S if wanted else UNANSWERED_S)
        try:
            caller.connect((address, port))
        except OSError:
            return False
        return True


@contextmanager
def connection(host: Host, other: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give both ends of a connection from a host to another one."""
    with listening(other) as listener, closing(host.open_socket()) as caller:
        caller.settimeout(ANSWERED_S)
        caller.connect((other.address, PORT))
        accepted, _ = listener.accept()
        with closing(accepted):
            accepted.settimeout(ANSWERED_S)
            yield caller, accepted


def delivers(
    sender: socket.socket, receiver: socket.socket, address: str, port: int = PORT, *, wanted: bool = True
) -> bool:
    """Return whether a datagram to an address gets to a socket; ``wanted`` decides how long it may take."""
    receiver.settimeout(ANSWERED_S if wanted else UNANSWERED_S)
    sender.sendto(b"datagram", (address, port))
    try:
        return receiver.recv(64) == b"datagram"
    except TimeoutError:
        return False


@contextmanager
def datagram_sockets(*hosts: Host) -> Iterator[list[socket.socket]]:
    """Give a UDP socket on each host, bound to the port."""
    made = [host.open_socket(socket.SOCK_DGRAM) for host in hosts]
    try:
        for each in made:
            each.bind((ALL, PORT))
        yield made
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize(
    ("direction", "sends", "receives"),
    [("both", False, False), ("in", True, False), ("out", False, True)],
)
def test_a_cut_drops_packets_in_its_direction_only(
    hosts: Hosts, direction: Direction, sends: bool, receives: bool
) -> None:
    here, there, third = hosts.plain, hosts.other, hosts.third
    with datagram_sockets(here, there, third) as (own, others, thirds):
        with here.cut_from([there], direction):
            if sends:
                assert delivers(own, others, there.address)
            else:
                # If a host drops its own packet, the system call fails.
                with pytest.raises(PermissionError):
                    own.sendto(b"datagram", (there.address, PORT))
            assert delivers(others, own, here.address, wanted=receives) == receives
            assert delivers(own, thirds, third.address)
            assert delivers(thirds, own, here.address)
        assert delivers(own, others, there.address)
        assert delivers(others, own, here.address)


def test_a_connection_outlives_a_cut(hosts: Hosts) -> None:
    with connection(hosts.plain, hosts.other) as (here, there):
        with hosts.plain.cut_from([hosts.other]):
            here.sendall(b"sent inside the cut")
            there.settimeout(UNANSWERED_S)
            with pytest.raises(TimeoutError):
                there.recv(64)
        there.settimeout(ANSWERED_S)
        assert there.recv(64) == b"sent inside the cut"


def test_a_firewall_lets_its_ports_in_and_nothing_else(hosts: Hosts) -> None:
    host, other = hosts.plain, hosts.other
    ports = {PORT - 1: False, PORT: True, PORT + 5: True, PORT + 10: True, PORT + 11: False}

    def found(wanted: dict[int, bool]) -> dict[int, bool]:
        seen = {}
        for port in ports:
            with listening(host, port):
                seen[port] = reaches(other, host.address, port, wanted=wanted[port])
                assert reaches(host, "127.0.0.1", port)
                assert reaches(host, host.address, port), "a host always reaches itself"
        return seen

    with host.firewall((PORT, PORT + 10)):
        assert found(ports) == ports
        with listening(other):
            assert reaches(host, other.address), "a firewall does not hinder outgoing connections"
    assert all(found(dict.fromkeys(ports, True)).values())


def test_a_firewall_drops_datagrams_that_answer_none(hosts: Hosts) -> None:
    host, other = hosts.plain, hosts.other
    with host.firewall((PORT + 1, PORT + 1)), datagram_sockets(host, other) as (own, others):
        assert not delivers(others, own, host.address, wanted=False)
        assert delivers(own, others, other.address)
        assert delivers(others, own, host.address), "an answer"
        with closing(host.open_socket(socket.SOCK_DGRAM)) as open_one:
            open_one.bind((ALL, PORT + 1))
            assert delivers(others, open_one, host.address, PORT + 1)


def test_connections_from_before_a_firewall_go_on(hosts: Hosts) -> None:
    host, other = hosts.plain, hosts.other
    with connection(other, host) as (there, here), host.firewall((PORT + 1, PORT + 1)):
        there.sendall(b"in")
        assert here.recv(64) == b"in"
        here.sendall(b"out")
        assert there.recv(64) == b"out"


def test_a_host_behind_nat_reaches_others_under_the_address_of_its_router(hosts: Hosts) -> None:
    assert hosts.natted.address != hosts.natted.public_address
    with connection(hosts.natted, hosts.plain) as (here, there):
        assert here.getsockname()[0] == hosts.natted.address
        assert there.getpeername()[0] == hosts.natted.public_address
        there.sendall(b"answer")
        assert here.recv(64) == b"answer"


def test_nobody_reaches_a_host_behind_nat(hosts: Hosts) -> None:
    with listening(hosts.natted):
        assert reaches(hosts.natted, hosts.natted.address)
        for address in (hosts.natted.address, hosts.natted.public_address):
            assert not reaches(hosts.plain, address, wanted=False)
        # A route to the host's own address does not change this.
        route = (f"{hosts.natted.address}/32", "via", hosts.natted.public_address)
        hosts.plain.run("ip", "route", "add", *route)
        try:
            assert not reaches(hosts.plain, hosts.natted.address, wanted=False)
        finally:
            hosts.plain.run("ip", "route", "delete", *route)


def test_a_host_behind_nat_can_be_cut_off_by_both_sides(hosts: Hosts) -> None:
    with listening(hosts.plain):
        with hosts.plain.cut_from([hosts.natted]):
            assert not reaches(hosts.natted, hosts.plain.address, wanted=False)
        with hosts.natted.cut_from([hosts.plain]):
            assert not reaches(hosts.natted, hosts.plain.address, wanted=False)
        assert reaches(hosts.natted, hosts.plain.address)


def test_others_reach_one_of_two_addresses(hosts: Hosts) -> None:
    assert hosts.two.second_address is not None
    with listening(hosts.two):
        assert reaches(hosts.plain, hosts.two.address)
        assert not reaches(hosts.plain, hosts.two.second_address, wanted=False)
        assert reaches(hosts.two, hosts.two.second_address)
    with connection(hosts.two, hosts.plain) as (_, there):
        assert there.getpeername()[0] == hosts.two.address


def test_the_second_address_is_the_one_towards_the_internet(hosts: Hosts) -> None:
    with closing(hosts.two.open_socket(socket.SOCK_DGRAM)) as probe:
        probe.connect(("8.8.8.8", 53))
        assert probe.getsockname()[0] == hosts.two.second_address


def test_a_dead_resolver_leaves_queries_unanswered() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Network(is_resolver_dead=True) as network:
        for host in (network.add(), network.add(behind_nat=True), network.add(second_address=True)):
            configured = subprocess.check_output([*host.inside, "cat", "/etc/resolv.conf"], text=True)
            _, address = configured.split()
            with closing(host.open_socket(socket.SOCK_DGRAM)) as querying:
                querying.settimeout(UNANSWERED_S)
                querying.connect((address, 53))
                querying.send(b"query")
                with pytest.raises(TimeoutError):
                    querying.recv(64)


def round_trip_s(caller: socket.socket, accepted: socket.socket) -> float:
    """Return the shortest of three round trips, so that a busy machine does not count as delay."""
    taken = []
    for _ in range(3):
        began = time.monotonic()
        caller.sendall(b"ping")
        assert accepted.recv(4) == b"ping"
        accepted.sendall(b"pong")
        assert caller.recv(4) == b"pong"
        taken.append(time.monotonic() - began)
    return min(taken)


def overtakes(fast: Host, slow: Host, receiver: Host) -> bool:
    """Return whether a packet of one host arrives before a packet that another host sent earlier."""
    with (
        datagram_sockets(slow, receiver) as (first, arrivals),
        closing(fast.open_socket(socket.SOCK_DGRAM)) as second,
    ):
        arrivals.settimeout(ANSWERED_S)
        while True:
            began = time.monotonic()
            first.sendto(b"first", (receiver.address, PORT))
            second.sendto(b"second", (receiver.address, PORT))
            were_sent_together = time.monotonic() - began < OVERTAKEN_S / 2
            arrived = [arrivals.recv(64) for _ in range(2)]
            if were_sent_together:
                return arrived == [b"second", b"first"]


def transfer_s(sender: socket.socket, receiver: socket.socket, size: int) -> float:
    """Return the time from the first byte sent to the last one received."""
    data = bytes(range(256)) * (size // 256)
    began = time.monotonic()
    sending = threading.Thread(target=sender.sendall, args=(data,))
    sending.start()
    received = bytearray()
    while len(received) < len(data):
        received += receiver.recv(1 << 16)
    sending.join()
    assert received == data
    return time.monotonic() - began


def test_a_slow_link_delays_both_directions_and_keeps_connections(hosts: Hosts) -> None:
    delay_s = 0.05
    with connection(hosts.plain, hosts.other) as (here, there):
        assert round_trip_s(here, there) > 0
        with hosts.plain.slow(delay_s=delay_s):
            assert round_trip_s(here, there) >= 2 * delay_s
            assert round_trip_s(there, here) >= 2 * delay_s
        assert round_trip_s(here, there) > 0
    with hosts.third.slow(delay_s=OVERTAKEN_S):
        assert overtakes(hosts.plain, hosts.third, hosts.other), "the link is slow after the block as well"


def test_a_slow_link_leaves_the_links_of_other_hosts_alone(hosts: Hosts) -> None:
    delay_s = 0.05
    with hosts.plain.slow(delay_s=OVERTAKEN_S):
        assert overtakes(hosts.third, hosts.plain, hosts.other)
    with (
        hosts.plain.slow(delay_s=delay_s),
        hosts.other.slow(delay_s=delay_s),
        connection(hosts.plain, hosts.other) as ends,
    ):
        assert round_trip_s(*ends) >= 4 * delay_s


def test_delayed_packets_do_not_wait_for_each_other(hosts: Hosts) -> None:
    with hosts.plain.slow(delay_s=0.2), datagram_sockets(hosts.plain, hosts.other) as (own, others):
        others.settimeout(ANSWERED_S)
        for number in range(50):
            own.sendto(bytes([number]), (hosts.other.address, PORT))
        assert [others.recv(64) for _ in range(50)] == [bytes([number]) for number in range(50)]


def test_delayed_frames_are_on_their_way_at_the_same_time() -> None:
    line = Line(delay_s=0.2, bytes_per_s=1e6)
    for number in range(50):
        line.push(bytes([number]), now=10.0)
    assert line.pop(10.19) is None
    assert [line.pop(10.21) for _ in range(50)] == [bytes([number]) for number in range(50)]
    assert line.due_at() is None


def test_a_line_drops_what_its_queue_cannot_hold() -> None:
    line = Line(delay_s=0.2, bytes_per_s=1e6)
    for number in range(2 * LIMIT):
        line.push(number.to_bytes(100), now=10.0)
    assert [line.pop(1e6) for _ in range(LIMIT)] == [number.to_bytes(100) for number in range(LIMIT)]
    assert line.pop(1e6) is None


@pytest.mark.parametrize("is_sending", [True, False])
def test_a_slow_link_limits_the_rate_of_each_direction(hosts: Hosts, is_sending: bool) -> None:
    rate, size = 2e6, 1 << 20
    with hosts.plain.slow(bytes_per_s=rate), connection(hosts.plain, hosts.other) as ends:
        assert transfer_s(*(ends if is_sending else ends[::-1]), size) >= size / rate


def test_a_slow_link_drops_what_its_queue_cannot_hold(hosts: Hosts) -> None:
    sent = 4000
    with (
        hosts.plain.slow(bytes_per_s=1e5),  # the queue is full long before it has sent half of them
        datagram_sockets(hosts.plain, hosts.other) as (own, others),
    ):
        others.settimeout(UNANSWERED_S)
        for number in range(sent):
            own.sendto(number.to_bytes(100), (hosts.other.address, PORT))
        received: list[int] = []
        while not received or received[-1] != sent:
            try:
                received.append(int.from_bytes(others.recv(200)))
            except TimeoutError:  # the queue is empty, or the machine is busy
                own.sendto(sent.to_bytes(100), (hosts.other.address, PORT))
    while received[-1] == sent:
        received.pop()
    assert received == sorted(received)
    assert 0 < len(received) < sent


def test_a_host_behind_nat_can_have_a_slow_link(hosts: Hosts) -> None:
    with (
        hosts.natted.slow(delay_s=0.05, bytes_per_s=1e7),
        connection(hosts.natted, hosts.plain) as ends,
    ):
        assert round_trip_s(*ends) >= 2 * 0.05
        assert transfer_s(*ends, 1 << 16) >= 0.05


def test_this_machines_own_network_stays_as_it_is() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    devices, own = sorted(DEVICES.iterdir()), OWN_NETWORK.readlink()
    with Network() as network, listening(network.add()) as listener:
        with socket.create_connection((network.hosts[0].address, PORT), ANSWERED_S):
            listener.accept()[0].close()
        assert OWN_NETWORK.readlink() != own, "this thread is on the bridge"
        assert sorted(DEVICES.iterdir()) == devices
    assert OWN_NETWORK.readlink() == own
    assert sorted(DEVICES.iterdir()) == devices


def test_a_network_leaves_nothing_behind() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Network(is_resolver_dead=True) as network:
        host, natted = network.add(), network.add(behind_nat=True)
        with listening(host):
            assert reaches(natted, host.address)
        left_open = host.slow(delay_s=0.01)
        left_open.__enter__()
        (shim,) = (each for each in psutil.Process().children() if "shim" in title(each))
        assert len(namespaces(host.bridge)) == 4, "a bridge, a router and two hosts"
    assert namespaces(host.bridge) == []
    wait_for(lambda: shim.status() == psutil.STATUS_ZOMBIE, "the end of the shim", ANSWERED_S)
    with pytest.raises(RuntimeError, match="netns exec"):
        left_open.__exit__(None, None, None)
    assert not shim.is_running()


def namespaces(prefix: str) -> list[str]:
    return [each.name for each in Path("/run/netns").iterdir() if each.name.startswith(prefix)]
