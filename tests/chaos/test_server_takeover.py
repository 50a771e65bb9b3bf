"""A job on real machines survives its coordinator, the Ray head and the server, and takes each step once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import descendants
from tests.held_ports import HeldPort

from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.store import EventRecord
from share_compute_api.client.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

JOB = {
    "name": "long",
    "model": {
        "layers": [
            {"type": "linear", "options": {"in_features": 64, "out_features": 512}},
            {"type": "relu"},
            {"type": "linear", "options": {"in_features": 512, "out_features": 10}},
        ]
    },
    "data": {"dataset": "digits"},
    # Without a checkpoint, an attempt that does not take over the members begins with step 1 again.
    "training": {"steps": 100_000, "batch_size": 1024, "microbatches": 16},
    "parallelism": {"stages": 1, "members_per_stage": 2, "strategy": "uniform"},
}


def ready(client: Client) -> list[str]:
    return sorted(one.name for one in client.contributors() if one.state is ContributorState.ready)


def join_command(client: Client, url: str, name: str) -> list[str]:
    """Return the arguments with which a machine joins a server."""
    code = client.create_invite(label=name).code
    lent = ("--memory", "600MiB", "--cpu-threads", "1", "--device", "cpu", "--json")
    return ["join", url, "--invite", code, "--name", name, *lent]


def events(client: Client, job_id: str) -> list[EventRecord]:
    recorded: list[EventRecord] = []
    while page := client.events(job_id, after=recorded[-1].seq if recorded else 0).events:
        recorded += page
    return recorded


def starts(client: Client, job_id: str) -> list[int]:
    """Return the first step of each attempt that began to train."""
    return [event.data["first_step"] for event in events(client, job_id) if event.kind == "started"]


def child(process: psutil.Process, name: str) -> psutil.Process:
    return descendants(name, process.pid)[0]


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(["ray::Coordinator"], marks=pytest.mark.thorough),
        ["raylet", "the server"],
    ],
    ids=" and then ".join,
)
def test_a_job_outlives(
    victims: list[str], tmp_path: Path, run_server: Any, run_command: Any, wait_for: Callable[..., Any]
) -> None:
    port = HeldPort()
    with ExitStack() as servers, ExitStack() as machines:
        server = servers.enter_context(run_server(tmp_path, port=port.number))
        with server.client() as client:
            for name in ("ada", "bob"):
                machines.enter_context(run_command(tmp_path, *join_command(client, server.url, name)))
            wait_for(lambda: ready(client) == ["ada", "bob"], "two machines")
            job_id = client.submit(JOB).id
            wait_for(lambda: client.job(job_id).step > 20, "steps")
            for attempt, victim in enumerate(victims, 1):
                job = client.job(job_id)
                assert job.attempt == attempt
                process = psutil.Process(server.command.process.pid)
                if victim == "the server":
                    process.kill()
                    server.command.process.wait()
                    server = servers.enter_context(run_server(tmp_path, port=port.number))
                else:
                    child(process, victim).kill()
                wait_for(lambda last=attempt: client.job(job_id).attempt > last, "the next attempt")
                wait_for(lambda last=attempt: len(starts(client, job_id)) > last, "its start")
                assert starts(client, job_id)[attempt] > job.step
                wait_for(lambda before=job.step: client.job(job_id).step > before + 20, "more steps")
            client.cancel(job_id)
            wait_for(lambda: client.job(job_id).state is JobState.cancelled, "cancelled")
            steps = [metric.step for metric in client.metrics(job_id) if metric.split == "train"]
            assert steps == list(range(1, len(steps) + 1))
            recorded = [event.data["step"] for event in events(client, job_id) if event.kind == "step"]
            assert recorded == steps
