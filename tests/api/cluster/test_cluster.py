"""The Ray head and the gateway of a real server: whichever process fails, the server answers and replaces it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from share_compute.errors import Unavailable
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute_actors.machine.processes import is_alive
from share_compute_api.agent.client import preflight
from share_compute_api.client.client import Client
from share_compute_api.schemas.agents import PreflightRequest
from share_compute_api.schemas.versions import local_versions

pytestmark = pytest.mark.slow

JOB = {
    "name": "short",
    "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
    "data": {"dataset": "digits"},
    "training": {"steps": 3},
}
GATEWAY = "share_compute_api.cluster.gateway_process"

Join = Callable[[Any, str], AbstractContextManager[Any]]


@pytest.fixture
def join(tmp_path: Path, run_command: Callable[..., Any]) -> Join:
    """Let a machine join a server inside a block."""

    def join(server: Any, name: str) -> Any:
        given = ("--memory", "600MiB", "--cpu-threads", "1", "--device", "cpu", "--json", "--name", name)
        with server.client() as client:
            code = client.create_invite(label=name).code
        return run_command(tmp_path, "join", server.url, *given, SHARE_COMPUTE_INVITE=code)

    return join


def child(server: Any, word: str) -> psutil.Process | None:
    """Return a running process below a server that has this name, or this argument."""
    for one in psutil.Process(server.command.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if is_alive(one) and word in (one.name(), *one.cmdline()):
                return one
    return None


def ready(client: Client, name: str) -> bool:
    return any(one.name == name for one in client.contributors() if one.state is ContributorState.ready)


@pytest.mark.parametrize(
    ("kills", "stopped"),
    [
        (2, "gcs_server"),
        pytest.param(5, "raylet", marks=pytest.mark.thorough),
        pytest.param(5, GATEWAY, marks=pytest.mark.thorough),
    ],
)
def test_the_server_outlives_every_head(
    kills: int,
    stopped: str,
    tmp_path: Path,
    run_server: Callable[..., Any],
    join: Join,
    wait_for: Callable[..., Any],
) -> None:
    """Its processes are killed one after the other. The last one is stopped instead: it exists, but does not answer."""
    with run_server(tmp_path / "data") as own, own.client() as client:
        for _ in range(kills):
            raylet = wait_for(lambda: child(own, GATEWAY) and child(own, "raylet"), "a head with a gateway")
            raylet.kill()
            wait_for(lambda victim=raylet: not is_alive(victim), "its end")
            assert client.health().status == "ok"
        (alert,) = wait_for(client.alerts, "an alert")
        assert alert.kind == "no-cluster"
        assert "the Ray head" in alert.text
        wait_for(lambda: not client.alerts(), "the end of the alert")
        with join(own, "ash"):
            wait_for(lambda: ready(client, "ash"), "a machine")
            job = client.submit(JOB)
            wait_for(lambda: client.job(job.id).state is JobState.succeeded, "the job's end")
            process = wait_for(lambda: child(own, stopped), stopped)
            process.suspend()
            wait_for(lambda: not is_alive(process), "its end")
            assert client.health().status == "ok"
            wait_for(lambda: "unanswered" in own.command.text(), "the reason")
            wait_for(lambda: child(own, stopped) and not client.alerts(), "another one")
        assert own.command.stop() == 0


@contextmanager
def rotating(server: Any, wait_for: Callable[..., Any]) -> Iterator[None]:
    """Enter the block while the cluster's token is being replaced; leave it when that has ended, or the server has."""

    def rotate() -> None:
        with server.client() as client, suppress(Unavailable):  # the server may be stopped
            client.rotate_token()

    def refusal() -> str | None:
        try:
            preflight(server.url, wanted)
        except Unavailable as refused:
            return refused.message
        assert not done.done(), "the token was changed before anybody could ask"
        return None

    with server.client() as client, ThreadPoolExecutor(1) as thread:
        wanted = PreflightRequest(invite=client.create_invite().code, versions=local_versions())
        done = thread.submit(rotate)
        assert "token is being changed" in wait_for(refusal, "a refusal")
        yield


@pytest.mark.thorough
def test_machines_that_come_while_the_token_changes_wait_and_a_server_that_is_stopped_then_ends_whole(
    tmp_path: Path, run_server: Callable[..., Any], join: Join, wait_for: Callable[..., Any]
) -> None:
    with run_server(tmp_path / "data") as own, own.client() as client:
        before = (own.data_folder / "ray-token").read_text()
        with join(own, "ash"):  # with the former token, or refused while it joins
            wait_for(client.contributors, "a machine")
            with rotating(own, wait_for):
                pass
            assert (own.data_folder / "ray-token").read_text() != before
            with join(own, "birch"):
                for name in ("ash", "birch"):
                    wait_for(lambda name=name: ready(client, name), f"{name} ready")
        before = (own.data_folder / "ray-token").read_text()
        family = psutil.Process(own.command.process.pid).children(recursive=True)
        with rotating(own, wait_for):
            assert own.command.stop() == 0
        assert not any(is_alive(process) for process in family)
    with run_server(tmp_path / "data") as again, again.client() as client:
        assert (tmp_path / "data" / "ray-token").read_text() != before
        assert client.health().status == "ok"
