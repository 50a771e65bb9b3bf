"""Real heads and nodes, side by side on one host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from share_compute.errors import Conflict, ShareComputeError
from share_compute.settings import Settings
from share_compute_actors.machine import head as head_module
from share_compute_actors.machine.head import Head
from share_compute_actors.machine.node import NodeAccess, NodeLimits, start_node
from share_compute_actors.machine.ports import DEFAULT_RANGE, NodePorts
from share_compute_actors.machine.processes import Child, ChildProcesses, is_alive
from share_compute_actors.machine.run_folders import close_run_folder, open_run_folder

LIMITS = NodeLimits(memory_bytes=600 * 2**20, cpu_threads=1)


@pytest.fixture
def rosters() -> Iterator[list[ChildProcesses]]:
    made = [open_run_folder(f"test node {os.getpid()} {number}") for number in range(2)]
    yield made
    for children in reversed(made):
        close_run_folder(children)


StartHead = Callable[..., Head]


@pytest.fixture
def start_head() -> Iterator[StartHead]:
    """Start heads with `start_head`, and release their ports at the end."""
    with ExitStack() as stack:

        def start(*arguments: Any, **options: Any) -> Head:
            head = head_module.start_head(*arguments, **options)
            stack.callback(head.place.ports.release)
            return head

        yield start


@pytest.fixture
def ports() -> Iterator[NodePorts]:
    """Ports of one small node."""
    held = NodePorts.take(DEFAULT_RANGE, threads=1)
    yield held
    held.release()


def access(head: Head, **changes: str) -> NodeAccess:
    known = {"ray_address": head.ray_address, "token": head.place.token, **changes}
    return NodeAccess(labels={"share-compute-contributor": "con-1"}, environment={}, **known)


@pytest.mark.slow
def test_a_head_keeps_its_port_and_token_and_leaves_nothing(
    tmp_path: Path, rosters: list[ChildProcesses], start_head: StartHead
):
    settings = Settings(data_folder=tmp_path)
    for spoilt_by_a_full_disk in ("ray-port", "ray-token"):
        (tmp_path / spoilt_by_a_full_disk).touch()
    first = start_head(settings, rosters[0], "127.0.0.1")
    family = first.node.child.family()
    rosters[0].stop(first.node.child)
    assert not any(is_alive(member) for member in family)
    second = start_head(settings, rosters[0], "127.0.0.1")
    assert (second.ray_address, second.place.token) == (first.ray_address, first.place.token)
    assert len(second.place.token) == 64
    assert second.node.node_id != first.node.node_id
    assert (tmp_path / "ray-token").stat().st_mode & 0o077 == 0
    rosters[0].stop(second.node.child)
    moved = start_head(Settings(data_folder=tmp_path, port_range="34000-34499"), rosters[0], "127.0.0.1")
    assert 34000 <= int(moved.ray_address.rpartition(":")[2]) <= 34499


@pytest.mark.slow
def test_a_node_joins_only_with_the_token(
    tmp_path: Path, rosters: list[ChildProcesses], start_head: StartHead, ports: NodePorts
):
    head = start_head(Settings(data_folder=tmp_path), rosters[0], "127.0.0.1")
    node = start_node(rosters[1], access(head), LIMITS, ports)
    assert listened(node.child) <= set(ports.all)
    assert listened(node.child) >= set(ports.own[:2]), "node manager and object manager"
    assert listened(head.node.child) <= {*head.place.ports.all, int(head.ray_address.rpartition(":")[2])}
    assert node.gcs_address == head.ray_address
    assert len(node.node_id) == 56
    rosters[1].stop(node.child)
    with pytest.raises(ShareComputeError) as refused:
        start_node(rosters[1], access(head, token="0" * 64), LIMITS, ports)
    assert refused.value.hint
    assert not rosters[1].leftovers()


def listened(child: Child) -> set[int]:
    """Return the TCP ports on which processes of a node accept connections from other hosts."""
    return {
        connection.laddr.port
        for process in child.family()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.startswith("127.")
    }


def test_a_taken_port_is_named(tmp_path: Path, rosters: list[ChildProcesses], start_head: StartHead):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=str(port)) as refused:
            start_head(Settings(data_folder=tmp_path, ray_port=port), rosters[0], "127.0.0.1")
    assert refused.value.hint


@pytest.mark.thorough
def test_two_heads_stand_side_by_side(tmp_path: Path, rosters: list[ChildProcesses], start_head: StartHead):
    heads = [
        start_head(Settings(data_folder=tmp_path / str(number)), children, "127.0.0.1")
        for number, children in enumerate(rosters)
    ]
    assert heads[0].ray_address != heads[1].ray_address
    assert heads[0].place.token != heads[1].place.token
