"""Nodes hold their TCP ports in one range, and machines find out whether others reach these."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import psutil
import pytest
from tests.conftest import wait_for

from share_compute.errors import Conflict, UserError
from share_compute_actors.machine.ports import NodePorts, PortRange, ports_text
from share_compute_actors.machine.reach import answers, closed_ports, listening

HELLO = b"0123456789abcdef"
LONGER_THAN_A_TEST_S = 3600.0
"""A wait for this time makes a test fail, since it hangs."""


def test_ranges_are_read_and_bad_ones_are_named() -> None:
    assert PortRange.parse(" 24000 - 24999 ") == PortRange(24000, 24999)
    assert str(PortRange(24000, 24999)) == "24000-24999"
    for text in ("", "24000", "24999-24000", "80-1000", "65000-70000", "24000-24010", "a-b", "1-2-3"):
        with pytest.raises(UserError, match="no range") as refused:
            PortRange.parse(text)
        assert "24000-25999" in (refused.value.hint or "")


def test_nodes_never_share_ports_and_give_them_back(free_ports: PortRange) -> None:
    with ExitStack() as stack:
        held = [NodePorts.take(free_ports, threads=2) for _ in range(2)]
        for ports in held:
            stack.callback(ports.release)
        assert not set(held[0].all) & set(held[1].all)
        assert all(free_ports.first < port <= free_ports.last for ports in held for port in ports.all)
        with pytest.raises(Conflict, match=f"0 of {free_ports}"):
            NodePorts.take(free_ports, threads=2)
        held[0].release()
        again = NodePorts.take(free_ports, threads=2)
        stack.callback(again.release)
        assert again.all == held[0].all


def test_a_node_of_many_threads_takes_more_and_leaves_out_what_is_taken(free_ports: PortRange) -> None:
    with pytest.raises(Conflict, match="150 free"):
        NodePorts.take(free_ports, threads=100)
    with socket.create_server(("", free_ports.first + 7)):
        ports = NodePorts.take(free_ports, threads=2)
        ports.release()
    assert ports.all[0] == free_ports.first + 51
    assert len(set(ports.all)) == len(ports.all) == 49


def test_ray_is_given_all_its_ports(free_ports: PortRange) -> None:
    ports = NodePorts.take(free_ports, threads=2)
    ports.release()
    words = dict(word.split("=", 1) for word in ports.arguments())
    found = [int(port) for text in words.values() for port in text.split(",")]
    assert sorted(found) == sorted({*ports.own, *ports.workers})


def test_ports_are_written_for_people() -> None:
    assert ports_text([24003, 24001, 24002, 24010]) == "24001-24003, 24010"
    assert ports_text([]) == ""


def test_a_place_without_a_route_does_not_answer() -> None:
    no_host = ("255.255.255.255", 9)  # TCP has no broadcasts: connecting fails at once
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = server.getsockname()[:2]
        assert answers([no_host, here]) == {here: "open"}
    assert answers([no_host, here]) == {here: "refused"}


def test_closed_ports_are_those_where_nobody_or_somebody_else_answers(free_ports: PortRange) -> None:
    first = free_ports.first
    with (
        listening("127.0.0.1", range(first, first + 20), HELLO),
        listening("127.0.0.1", [first + 20], b"another one, yes"),
    ):
        ports = [*range(first, first + 20), first + 20, first + 21]
        assert closed_ports("127.0.0.1", ports, HELLO) == (first + 20, first + 21)
    assert closed_ports("127.0.0.1", [first], HELLO) == (first,)


def test_somebody_who_says_nothing_is_given_up(free_ports: PortRange) -> None:
    with socket.create_server(("127.0.0.1", free_ports.first)):
        assert closed_ports("127.0.0.1", [free_ports.first], HELLO, within_s=0.2) == (free_ports.first,)


def is_connected(port: int) -> bool:
    """Return whether this process holds an accepted connection at a port, which the caller may have closed."""
    return any(
        each.laddr.port == port and each.raddr
        for each in psutil.Process().net_connections("tcp")
        if each.laddr
    )


@pytest.mark.parametrize("hangs_up", [True, False])
def test_ports_that_were_dialled_are_free_at_once(free_ports: PortRange, *, hangs_up: bool) -> None:
    """Ray gives a worker only a port that it can bind without ``SO_REUSEADDR``: none is left in TIME-WAIT."""
    with ExitStack() as stack:
        with listening("127.0.0.1", [free_ports.first], HELLO):
            caller = stack.enter_context(socket.create_connection(("127.0.0.1", free_ports.first)))
            assert caller.recv(len(HELLO)) == HELLO
            if hangs_up:
                caller.close()
                wait_for(lambda: not is_connected(free_ports.first), "the listener to close the connection")
        with socket.socket() as worker:
            worker.bind(("127.0.0.1", free_ports.first))


def test_one_answer_is_enough_where_others_are_unresponsive(free_ports: PortRange) -> None:
    with ExitStack() as stack:
        places = []
        for port, backlog in ((free_ports.first, 8), (free_ports.first + 1, 0)):
            server = stack.enter_context(socket.socket())
            server.bind(("127.0.0.1", port))
            server.listen(backlog)
            places.append(("127.0.0.1", port))
        for _ in range(4):  # the kernel drops connections beyond a full backlog, so the last ones time out
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)  # noqa: FBT003
            waiting.connect_ex(places[1])
        assert answers(places, LONGER_THAN_A_TEST_S, until_first=True) == {places[0]: "open"}
        assert answers(places[1:], 0.3, until_first=True) == {}
