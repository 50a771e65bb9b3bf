"""Machines join a real server, keep working after failures, and leave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.conftest import descendants, ready

from share_compute.errors import NotAuthorized
from share_compute.lifecycle.states import ContributorState
from share_compute_actors.machine.processes import is_alive
from share_compute_api.cluster.cluster import ClusterInfo
from share_compute_api.terminal.children import own_command

pytestmark = pytest.mark.slow


def join_fails(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Return exit status and error of a join that must fail."""
    command = own_command("join", *arguments, "--json", "--device", "cpu")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **environment}
    )
    return done.returncode, json.loads(done.stderr.strip().splitlines()[-1])["error"]


def test_a_machine_joins_is_measured_leaves_and_comes_back_without_an_invite(
    server: Any, contributor: Any, wait_for: Any, run_command: Any, tmp_path: Path
) -> None:
    """It keeps its row, as when a service starts it after a reboot, until the operator removes it."""
    lent = ("--name", "kept", "--memory", "600MiB", "--cpu-threads", "1", "--device", "cpu", "--json")
    own = {"SHARE_COMPUTE_DATA_FOLDER": str(tmp_path)}
    with server.client() as client:
        code = client.create_invite().code
        with run_command(tmp_path, "join", server.url, *lent, **own, SHARE_COMPUTE_INVITE=code) as first:
            machine = wait_for(lambda: ready(client, "kept"), "the machine")
            (device,) = machine.capacity
            assert device.kind == "cpu"
            assert device.flops_per_s["float32"] > 1e8
            assert {"head", contributor.record.id} <= {link.target for link in machine.links}
            family = psutil.Process(first.process.pid).children(recursive=True)
            assert descendants("raylet", first.process.pid)
            assert first.stop() == 0
        assert not any(is_alive(process) for process in family)
        assert client.contributor(machine.id).state is ContributorState.left
        with run_command(tmp_path, "join", server.url, *lent, **own) as second:
            assert wait_for(lambda: ready(client, "kept"), "the machine again").id == machine.id
            client.remove_contributor(machine.id, keep_token=True)
            assert second.process.wait(120) == NotAuthorized.exit_code
            assert "left; the operator removed this machine: ask for a new invite" in second.text()


def test_the_agent_holds_no_ray_torch_or_sqlalchemy(contributor: Any):
    agent = psutil.Process(contributor.command.process.pid)
    mapped = {region.path for region in agent.memory_maps()}
    assert not any(name in path for path in mapped for name in ("_raylet", "libtorch", "sqlalchemy"))


def test_a_node_that_dies_is_started_again_and_a_killed_agent_is_noticed(
    server: Any, contributors: Callable[[], Any], wait_for: Any
):
    machine = contributors()
    agent = psutil.Process(machine.command.process.pid)
    descendants("raylet", agent.pid)[0].kill()

    def is_back() -> bool:
        record = client.contributor(machine.record.id)
        return record.state is ContributorState.ready and record.node_id != machine.record.node_id

    with server.client() as client:
        wait_for(is_back, "the machine back")
    family = psutil.Process(machine.command.process.pid).children(recursive=True)
    before = len(server.command.text())
    machine.command.process.kill()
    machine.command.process.wait()
    with server.client() as client:
        wait_for(lambda: client.contributor(machine.record.id).state is ContributorState.lost, "lost")
        assert client.contributor(machine.record.id).reason
    wait_for(lambda: not any(is_alive(process) for process in family), "its processes gone")
    # The terminal gets one line of ours; the output of Ray is in Ray's own log.
    lines = server.command.text()[before:].splitlines()
    (line,) = (line for line in lines if machine.record.name in line)
    assert line.startswith(f"contributor {machine.record.name} is lost: nothing was heard from it for")
    assert not [line for line in lines if "raylet" in line or "ray::" in line]


def test_a_wrong_invite(server: Any):
    status, error = join_fails(server.url, "--invite", "none-none-none-none", "--memory", "600MiB")
    assert (status, error["code"]) == (5, "invite-unknown")
    assert error["hint"]


def test_a_used_invite_and_a_taken_name(server: Any, contributor: Any):
    with server.client() as client:
        fresh = client.create_invite().code
        name = contributor.record.name
        status, error = join_fails(server.url, "--invite", fresh, "--name", name, "--memory", "600MiB")
        assert (status, error["code"]) == (4, "conflict")
        used = next(invite for invite in client.invites() if contributor.record.id in invite.used_by)
    assert used.state == "used"


def test_an_unreachable_server():
    status, error = join_fails("http://127.0.0.1:9", "--invite", "none-none-none-none", "--memory", "600MiB")
    assert (status, error["code"]) == (8, "unavailable")


def test_what_is_in_the_way_is_found_before_the_invite_is_used(plane: Any):
    invite, code = plane.store.invites.create()
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        info = ClusterInfo(f"127.0.0.1:{port}", "", "ab", "127.0.0.1", {})
        plane.app.state.context.cluster = SimpleNamespace(info=info, is_rotating=False, trouble=None)
        given = ("--memory", "600MiB", "--address", "192.0.2.1")
        status, error = join_fails(plane.url, *given, SHARE_COMPUTE_INVITE=code)
        assert status == 2
        assert "192.0.2.1" in error["detail"]
    status, error = join_fails(plane.url, "--memory", "600MiB", SHARE_COMPUTE_INVITE=code)
    assert (status, error["code"]) == (8, "unavailable")
    assert str(port) in error["hint"]
    assert [one.used_by for one in plane.store.invites.list() if one.id == invite.id] == [()]


def test_too_little_memory_and_too_much(server: Any):
    for memory, word in (("100MiB", "too little"), ("900TiB", "available")):
        status, error = join_fails(server.url, "--invite", "none-none-none-none", "--memory", memory)
        assert status == 2
        assert word in error["detail"]
        assert error["details"]["missing_bytes"] > 0
