"""Processes on several hosts are killed one after the other: no step is lost, and the result is the same."""

from __future__ import annotations

import pytest
from tests.conftest import wait_for
from tests.hosts.network import has_title
from tests.hosts.pool import Pool
from tests.hosts.training import train, train_undisturbed

from share_compute.jobs.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
STEPS = 2000


def settled_step(pool: Pool, after: int = 0) -> int | None:
    """Return the last step of the running job, once the job is protected and has taken some steps after this one."""
    with pool.server.client() as client:
        running = client.jobs(state=[JobState.running]).jobs
    return next((job.step for job in running if job.is_protected and job.step > after + 20), None)


def test_a_stage_that_is_lost_right_after_the_gcs_loses_nothing(pool: Pool) -> None:
    undisturbed = train_undisturbed(pool, steps=STEPS)

    def kill_gcs_and_member() -> None:
        step = wait_for(lambda: settled_step(pool), "two copies of each layer")
        pool.host.kill(has_title("gcs_server"))
        wait_for(lambda: settled_step(pool, after=step), "steps after the death of the GCS")
        with pool.server.client() as client:
            (job,) = client.jobs(state=[JobState.running]).jobs
            assert job.attempt == 1, "the coordinator continues"
        pool.machines["machine-1"].kill(has_title("ray::Member"))

    assert train(pool, "gcs and member", kill_gcs_and_member, steps=STEPS) == undisturbed
