"""Processes on several hosts are killed one after the other: no step is lost, and the result is the same."""

from __future__ import annotations

import pytest
from tests.conftest import wait_for
from tests.hosts.cluster import Cluster
from tests.hosts.network import has_title
from tests.hosts.training import Result, train

from share_compute.lifecycle.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def settled_step(cluster: Cluster, after: int = 0) -> int | None:
    """Return the last step of the running job, once the job is protected and has taken some steps after this one."""
    with cluster.server.client() as client:
        running = client.jobs(state=[JobState.running]).jobs
    return next((job.step for job in running if job.is_protected and job.step > after + 20), None)


@pytest.mark.thorough
def test_a_stage_that_is_lost_right_after_the_gcs_loses_nothing(
    cluster: Cluster, undisturbed: Result
) -> None:
    def kill_gcs_and_member() -> None:
        step = wait_for(lambda: settled_step(cluster), "two copies of each layer")
        cluster.host.kill(has_title("gcs_server"))
        wait_for(lambda: settled_step(cluster, after=step), "steps after the death of the GCS")
        with cluster.server.client() as client:
            (job,) = client.jobs(state=[JobState.running]).jobs
            assert job.attempt == 1, "the coordinator continues"
        cluster.machines["machine-1"].kill(has_title("ray::Member"))

    assert train(cluster, "gcs and member", kill_gcs_and_member) == undisturbed
