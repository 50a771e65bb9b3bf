"""A machine that others cannot reach reports it in one sentence and ends; one with an open port range works."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from typing import Any

import pytest
from tests.conftest import run_command, run_contributor, wait_for
from tests.hosts.cluster import Cluster
from tests.hosts.network import Host

from share_compute_actors.machine.ports import DEFAULT_RANGE

pytestmark = [pytest.mark.slow]
RANGE = (DEFAULT_RANGE.first, DEFAULT_RANGE.last)


def last_words(cluster: Cluster, host: Host, name: str) -> str:
    """Let a host join that others cannot reach; return what it printed until it ended."""
    with cluster.server.client() as client:
        code = client.create_invite(label=name).code
    lent = ("--memory", "600MiB", "--cpu-threads", "1", "--device", "cpu")
    joining = ("join", cluster.server.url, "--invite", code, "--name", name, "--address", host.address, *lent)
    folder = cluster.server.data_folder
    own = str(folder / "contributors")
    with run_command(
        folder, *joining, "--insecure", "--json", inside=host.inside, SHARE_COMPUTE_DATA_FOLDER=own
    ) as command:
        status = command.process.wait(120.0)
        assert status == 2, command.text()
        return command.text()


def test_a_machine_behind_a_firewall_names_its_closed_ports_and_ends(cluster: Cluster) -> None:
    host = cluster.network.add()
    with host.firewall(open_ports=(22, 22)):
        text = last_words(cluster, host, "walled")
    assert f"TCP ports of this machine ({host.address}) cannot be reached: {RANGE[0] + 1}-" in text
    for source in ("the server", *cluster.machines):
        assert f" from {source}" in text
    assert f"open TCP ports {DEFAULT_RANGE} of this machine" in text
    assert "; trying again" in text
    with cluster.server.client() as client:
        states = {one.name: one.state.value for one in client.contributors()}
    assert states.get("walled", "left") == "left"


def test_a_machine_behind_nat_learns_that_it_needs_an_overlay(cluster: Cluster) -> None:
    host = cluster.network.add(behind_nat=True)
    text = last_words(cluster, host, "behind")
    assert "cannot be reached" in text
    assert "behind NAT, connect the machines by an overlay network" in text


def test_the_range_is_all_that_a_firewall_has_to_open(cluster: Cluster) -> None:
    """All hosts accept no other connections, and a job trains over them."""
    host = cluster.network.add()
    machines = {**cluster.machines, "open": host}
    joining = ("open", "--address", host.address, "--insecure")
    with ExitStack() as stack:
        for each in machines.values():
            stack.enter_context(each.firewall(open_ports=RANGE))
        stack.enter_context(run_contributor(cluster.server, *joining, inside=host.inside))
        client = stack.enter_context(cluster.server.client())
        document: dict[str, Any] = {
            "model": {
                "layers": [
                    {"type": "linear", "options": {"in_features": 64, "out_features": 32}},
                    {"type": "relu"},
                    {"type": "relu"},
                    {"type": "linear", "options": {"in_features": 32, "out_features": 10}},
                ]
            },
            "data": {"dataset": "digits"},
            "training": {"steps": 20, "batch_size": 64},
            "parallelism": {"stages": len(machines), "channel": "direct"},
        }
        job_id = client.submit(document).id
        job = wait_for(
            lambda: found if (found := client.job(job_id)).state.is_final else None, "the job's end"
        )
        assert job.state.value == "succeeded", job.reason
        assert job.plan is not None
        assert {member.name for stage in job.plan.stages for member in stage.members} == set(machines)
        listening = subprocess.run(
            [*host.inside, "ss", "-Htln"], capture_output=True, text=True, check=True
        ).stdout.split("\n")
        ports = {
            int(row.split()[3].rpartition(":")[2]) for row in listening if row and "127.0.0.1" not in row
        }
        assert ports
        assert all(RANGE[0] <= port <= RANGE[1] for port in ports)
