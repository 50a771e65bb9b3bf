"""Two machines that do not reach each other: the link is measured as dead, and jobs are planned around it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from tests.conftest import run_contributor, wait_for
from tests.hosts.cluster import Cluster
from tests.hosts.network import Direction

from share_compute.errors import PlanInfeasible
from share_compute.planning.plan import Plan
from share_compute.store import JobRecord
from share_compute.topology import HEAD
from share_compute_api.terminal.children import own_command

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
WIDTHS = (64, 128, 64, 32, 10)
LAYERS = [
    {"type": "linear", "options": {"in_features": wide, "out_features": narrow}}
    for wide, narrow in pairwise(WIDTHS)
]
JOB: dict[str, Any] = {
    "model": {"layers": LAYERS},
    "data": {"dataset": "digits"},
    "training": {"steps": 20, "batch_size": 64},
}
NEW = "machine-new"


def neighbours(plan: Plan) -> set[frozenset[str]]:
    """Return the pairs of machines that send to each other."""
    stages = [[member.name for member in stage.members] for stage in plan.stages]
    return {
        frozenset({one, other}) for before, after in pairwise(stages) for one in before for other in after
    }


def run_job(cluster: Cluster, **changes: Any) -> JobRecord:
    with cluster.server.client() as client:
        job_id = client.submit({**JOB, **changes}).id

        def ended() -> JobRecord | None:
            job = client.job(job_id)
            return job if job.state.is_final else None

        return wait_for(ended, "the end of the job")


@pytest.fixture(
    scope="module", params=["both", pytest.param("in", marks=pytest.mark.thorough)], name="cut_cluster"
)
def cut_cluster_fixture(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Cluster]:
    """Four machines, of which machine-1 and machine-new do not reach each other since before the latter joined."""
    direction: Direction = request.param
    host = cluster.network.add()
    joining = ("--address", host.address, "--insecure")
    with (
        host.cut_from([cluster.machines["machine-1"]], direction),
        run_contributor(cluster.server, NEW, *joining, inside=host.inside),
    ):
        yield cluster


def measured_from_new(cluster: Cluster) -> dict[str, bool]:
    """Return for each machine that `NEW` has measured, and for the head, whether it reaches it."""
    with cluster.server.client() as client:
        topology = client.topology()
    names = {HEAD: HEAD, **{machine.key: machine.name for machine in topology.contributors}}
    links = {(names[link.source], names[link.target]): link.bytes_per_s for link in topology.links}
    return {target: rate > 0 for (source, target), rate in links.items() if source == NEW}


def test_the_links_of_a_machine_that_others_cannot_reach_are_dead(cut_cluster: Cluster) -> None:
    reached = {HEAD: True, "machine-0": True, "machine-1": False, "machine-2": True}
    assert measured_from_new(cut_cluster) == reached
    done = subprocess.run(
        own_command("contributors", "--links"),
        env={
            **os.environ,
            "SHARE_COMPUTE_URL": cut_cluster.server.url,
            "SHARE_COMPUTE_API_KEY": cut_cluster.server.api_key,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    # If machine-1 was too busy to answer, it has joined again and measured the link from its side as well.
    cut_off = {frozenset(line.split()[:2]) for line in done.stdout.splitlines() if "cut off" in line}
    assert cut_off == {frozenset({NEW, "machine-1"})}


def test_jobs_are_planned_around_a_dead_link(cut_cluster: Cluster) -> None:
    job = run_job(cut_cluster, parallelism={"stages": 4})
    assert job.state.value == "succeeded", job.reason
    assert job.plan is not None
    partners = set().union(*(pair for pair in neighbours(job.plan) if NEW in pair)) - {NEW}
    assert partners
    assert partners <= {"machine-0", "machine-2"}


@pytest.mark.thorough
def test_a_job_that_cannot_be_planned_around_it_is_refused_with_the_pair(cut_cluster: Cluster) -> None:
    # A machine that was too busy to answer rejoins after the job, and its links are measured again.
    wait_for(
        lambda: measured_from_new(cut_cluster).get("machine-1") is False, "the measurement of the dead link"
    )
    together = {"stages": 1, "members_per_stage": 4}
    with cut_cluster.server.client() as client, pytest.raises(PlanInfeasible, match=f"machine-1 - {NEW}"):
        client.plan({**JOB, "parallelism": together})
    job = run_job(cut_cluster, parallelism=together)
    assert job.state.value == "failed"
    assert f"machine-1 - {NEW}" in job.reason
