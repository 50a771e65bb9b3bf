"""Links between hosts are cut while a job trains: no step is lost, and the result is that of an undisturbed job."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from tests.conftest import wait_for
from tests.hosts.network import Direction
from tests.hosts.pool import Pool

from share_compute.jobs.states import JobState
from share_compute.models.weights import WeightFolder
from share_compute.store import JobRecord

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
STEPS = 400
JOB: dict[str, Any] = {
    "model": {
        "layers": [
            {"type": "linear", "options": {"in_features": 64, "out_features": 128}},
            {"type": "relu"},
            {"type": "linear", "options": {"in_features": 128, "out_features": 10}},
        ]
    },
    "data": {"dataset": "digits"},
    "training": {"steps": STEPS, "batch_size": 64},
    "parallelism": {"pools": 3},
}


@dataclass(frozen=True)
class Result:
    """What a job came to."""

    losses: list[tuple[int, float]]
    """Of each step that was told, in the order in which they were told."""
    digest: str
    """Of the weights."""


def train(pool: Pool, name: str, disturb: Callable[[], None] = lambda: None) -> Result:
    """Run the job; ``disturb`` is called when it has taken some steps."""
    with pool.server.client() as client:
        job_id = client.submit({**JOB, "name": name}).id

        def stepping() -> bool:
            job = client.job(job_id)
            assert not job.state.is_final, job.reason
            return job.step >= 20

        def ended() -> JobRecord | None:
            job = client.job(job_id)
            return job if job.state.is_final else None

        wait_for(stepping, "the first steps")
        disturb()
        job = wait_for(ended, "the end of the job")
        assert job.state is JobState.succeeded, job.reason
        losses = [(each.step, each.data["loss"]) for each in client.metrics(job_id) if each.split == "train"]
        (model,) = client.artifacts(job_id)
        return Result(losses, WeightFolder(model.path).digest())


@pytest.fixture(scope="module")
def undisturbed(pool: Pool) -> Result:
    result = train(pool, "undisturbed")
    assert [step for step, _ in result.losses] == list(range(1, STEPS + 1))
    return result


@pytest.mark.parametrize(
    ("seconds", "direction"),
    [
        pytest.param(4, "both"),
        pytest.param(4, "in", marks=pytest.mark.thorough),
        pytest.param(4, "out", marks=pytest.mark.thorough),
        pytest.param(30, "both", marks=pytest.mark.thorough),
        pytest.param(300, "both", marks=pytest.mark.thorough),
    ],
)
def test_a_server_that_is_cut_off_loses_nothing(
    pool: Pool, undisturbed: Result, seconds: float, direction: Direction
) -> None:
    def cut() -> None:
        with pool.host.cut_from(list(pool.machines.values()), direction):
            time.sleep(seconds)

    assert train(pool, f"server-{direction}-{seconds}", cut) == undisturbed


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(1, marks=pytest.mark.thorough), 5, pytest.param(30, marks=pytest.mark.thorough)],
)
def test_a_machine_that_is_cut_off_loses_nothing(pool: Pool, undisturbed: Result, seconds: float) -> None:
    def cut() -> None:
        host = pool.machines["machine-1"]
        with host.cut_from([pool.host, *(each for each in pool.machines.values() if each is not host)]):
            time.sleep(seconds)

    assert train(pool, f"machine-{seconds}", cut) == undisturbed


@pytest.mark.parametrize("direction", ["both", pytest.param("in", marks=pytest.mark.thorough)])
def test_two_machines_that_are_cut_from_each_other_lose_nothing(
    pool: Pool, undisturbed: Result, direction: Direction
) -> None:
    with ExitStack() as stack:
        cut = pool.machines["machine-1"].cut_from([pool.machines["machine-2"]], direction)
        name = f"pair-{direction}"
        assert train(pool, name, lambda: stack.enter_context(cut)) == undisturbed
        with pool.server.client() as client:
            (job,) = (job for job in client.jobs().jobs if job.name == name)
            assert job.plan is not None
            assert job.plan.pools[1].members[0].name == "machine-0", "both others reach it"

    def is_known_to_be_over() -> bool:
        with pool.server.client() as client:
            return all(link.bytes_per_s > 0 for link in client.topology().links)

    wait_for(is_known_to_be_over, "a new measurement of the link")
