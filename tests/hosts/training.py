"""Runs jobs on several hosts, with and without faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.conftest import ready, wait_for
from tests.hosts.cluster import Cluster
from tests.hosts.network import Direction

from share_compute.lifecycle.states import JobState
from share_compute.models.storage.weights import WeightFolder
from share_compute.store import JobRecord
from share_compute_api.client.client import Client

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
    "parallelism": {"stages": 3},
}


@dataclass(frozen=True)
class Result:
    """Losses and weights of a job."""

    losses: list[tuple[int, float]]
    """Step and loss of each reported step, in the order of the reports."""
    digest: str
    """Digest of the weights."""


def finished(
    cluster: Cluster,
    client: Client,
    spec: dict[str, Any],
    disturb: Callable[[], None] = lambda: None,
    *,
    may_disturb: Callable[[JobRecord], bool] = lambda _: True,
    may_end: bool = False,
) -> JobRecord:
    """Run a job on machines that are all ready, and return it when it has succeeded.

    Args:
        cluster: the cluster.
        client: client of its server.
        spec: the job.
        disturb: called once, when the job has taken some steps.
        may_disturb: whether ``disturb`` may be called by now.
        may_end: whether the job may end before ``disturb`` returns, as where other machines replace a lost one.
    """
    wait_for(lambda: all(ready(client, each) for each in cluster.machines), "all machines ready")
    job_id = client.submit(spec).id

    def stepping() -> bool:
        job = client.job(job_id)
        assert not job.state.is_final, job.reason
        return job.step >= 20 and may_disturb(job)

    def ended() -> JobRecord | None:
        job = client.job(job_id)
        return job if job.state.is_final else None

    wait_for(stepping, "the first steps")
    disturb()
    assert may_end or not client.job(job_id).state.is_final, "the job ended before the faults did"
    job = wait_for(ended, "the end of the job")
    assert job.state is JobState.succeeded, job.reason
    return job


def train(
    cluster: Cluster,
    name: str,
    disturb: Callable[[], None] = lambda: None,
    *,
    backups: bool = True,
    may_end: bool = True,
) -> Result:
    """Run the job once all machines are ready, and return its result.

    Args:
        cluster: with three machines.
        name: of the job.
        disturb: called when the job has taken some steps and, if it has backups, is protected.
        backups: whether each layer is on two machines.
        may_end: as in `finished`.
    """
    changes = {"name": name, "parallelism": {**JOB["parallelism"], "backups": backups}}
    with cluster.server.client() as client:
        job = finished(
            cluster,
            client,
            {**JOB, **changes},
            disturb,
            may_disturb=lambda job: job.is_protected is backups,
            may_end=may_end,
        )
        losses = [(each.step, each.data["loss"]) for each in client.metrics(job.id) if each.split == "train"]
        return Result(losses, digest(client, job))


def digest(client: Client, job: JobRecord) -> str:
    """Return the digest of a job's weights, which are on this host."""
    (model,) = client.artifacts(job.id)
    return WeightFolder(model.path).digest()


def cut(cluster: Cluster, end: str, seconds: float, direction: Direction = "both") -> None:
    """Cut ``server`` or a machine off from all other hosts for some time."""
    host = cluster.host if end == "server" else cluster.machines[end]
    with host.cut_from(cluster.others(host), direction):
        time.sleep(seconds)


def train_undisturbed(cluster: Cluster) -> Result:
    """Run the job without faults; it must report each step once."""
    result = train(cluster, "undisturbed")
    assert [step for step, _ in result.losses] == list(range(1, STEPS + 1))
    return result
