"""The image and docker-compose.yml make a cluster that works, and continues when its containers end."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.api.speaking import make_llama
from tests.conftest import wait_for
from tests.containers.engine import ROOT, Engine, base, database, engine, torch_index

from share_compute.errors import Unavailable
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.models.storage.weights import WeightFolder
from share_compute.store import JobRecord
from share_compute_api.client.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.thorough, pytest.mark.timeout(3600)]
STEPS = 2000
JOB: dict[str, Any] = {
    "name": "digits",
    "model": {
        "layers": [
            {"type": "linear", "options": {"in_features": 64, "out_features": 128}},
            {"type": "relu"},
            {"type": "linear", "options": {"in_features": 128, "out_features": 10}},
        ]
    },
    "data": {"dataset": "digits"},
    "training": {"steps": STEPS, "batch_size": 64, "checkpoint_every": 100},
    "parallelism": {"stages": 2},
}
PROMPT, TOKENS = "the quick brown fox", 240
_START_S = 600.0


@dataclass(frozen=True)
class Cluster:
    """The containers that `compose up` started."""

    engine: Engine
    project: str
    variables: dict[str, str]
    url: str

    def compose(self, *arguments: str) -> str:
        return self.engine.call_compose(self.variables, "-p", self.project, *arguments)

    def container(self, service: str, number: int = 1) -> str:
        separator = "-" if self.engine.program == "docker" else "_"
        return separator.join((self.project, service, str(number)))

    def read(self, file: str) -> dict[str, str]:
        """Return a JSON file of the server's data folder."""
        text = self.engine.run("exec", self.container("server"), "cat", f"/var/lib/share-compute/{file}")
        found: dict[str, str] = json.loads(text)
        return found

    def client(self) -> Client:
        key, fingerprint = self.read("credentials.json")["api_key"], self.read("server.json")["fingerprint"]
        return Client(self.url, key, fingerprint=fingerprint)

    def kill(self, service: str, number: int = 1) -> None:
        """Kill all processes of a container; its restart policy starts it again."""
        # The kernel spares the container's first process, which ends when its child has. `exec` may end with it.
        with suppress(RuntimeError):
            self.engine.run("exec", self.container(service, number), "sh", "-c", "kill -KILL -1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        runs = stack.enter_context(engine())
        image = f"localhost/share-compute-test-{secrets.token_hex(3)}"
        runs.build(image, ROOT, BASE=base(runs), TORCH_INDEX=torch_index())
        stack.callback(runs.run, "rmi", "-f", image)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        variables = {
            "IMAGE": image,
            "POSTGRES_IMAGE": database(runs),
            "POSTGRES_PASSWORD": secrets.token_hex(12),
            "PORT": f"127.0.0.1:{port}",
            "MEMORY": "700MiB",
        }
        cluster = Cluster(runs, f"sc{secrets.token_hex(3)}", variables, f"https://127.0.0.1:{port}")
        stack.callback(cluster.compose, "down", "-v")
        cluster.compose("up", "-d", "--no-build")
        wait_for(lambda: has_ready(cluster, 2), "two contributors", _START_S)
        yield cluster


def has_ready(cluster: Cluster, number: int) -> bool:
    try:
        with cluster.client() as client:
            return len(client.contributors(state=[ContributorState.ready])) == number
    except (RuntimeError, Unavailable):  # it starts
        return False


def train(
    cluster: Cluster,
    folder: Path,
    disturb: Callable[[Client, str], None] = lambda _client, _job: None,
) -> tuple[str, list[int]]:
    """Run the job; ``disturb`` is called when it has taken some steps. Return the weights' digest and all steps."""
    wait_for(lambda: has_ready(cluster, 2), "two contributors", _START_S)
    with cluster.client() as client:
        job_id = client.submit(JOB).id

        def ended() -> JobRecord | None:
            try:
                job = client.job(job_id)
            except Unavailable:  # its container starts again
                return None
            return job if job.state.is_final else None

        wait_for(lambda: ended() or client.job(job_id).step >= 20, "the first steps", _START_S)
        disturb(client, job_id)
        job = wait_for(ended, "the end of the job", _START_S)
        assert job.state is JobState.succeeded, job.reason
        steps = [each.step for each in client.metrics(job_id) if each.split == "train"]
        (model,) = client.artifacts(job_id)
        return WeightFolder(client.download(job_id, model.name, folder)).digest(), steps


def test_a_job_outlives_its_containers(cluster: Cluster, tmp_path: Path) -> None:
    undisturbed = train(cluster, tmp_path / "undisturbed")
    assert undisturbed[1] == list(range(1, STEPS + 1))

    def disturb(client: Client, job_id: str) -> None:
        cluster.kill("contributor")
        wait_for(lambda: "reformed" in {one.kind for one in client.events(job_id).events}, "a smaller group")
        assert not client.job(job_id).state.is_final
        cluster.engine.run("restart", cluster.container("server"))

    assert train(cluster, tmp_path / "disturbed", disturb) == undisturbed
    with cluster.client() as client:
        (invite,) = (one for one in client.invites() if one.label == "compose")
        assert len(invite.used_by) == 2  # the contributor that was killed came back with its own key


def test_a_stream_outlives_the_container_of_a_contributor(cluster: Cluster, tmp_path: Path) -> None:
    folder = make_llama(tmp_path, window=512, hidden_size=64, num_hidden_layers=4)
    wait_for(lambda: has_ready(cluster, 2), "two contributors", _START_S)
    with cluster.client() as client:
        upload = client.upload(folder)
        served = {"name": "llama", "model": {"path": f"upload:{upload.id}"}, "parallelism": {"stages": 2}}
        client.deploy(served)
        wait_for(lambda: client.deployment("llama").state is DeploymentState.ready, "the model", _START_S)

        def said() -> Iterator[str]:
            return client.complete("llama", PROMPT, temperature=0, max_tokens=TOKENS)

        undisturbed = "".join(said())
        pieces = said()
        text = "".join(next(pieces) for _ in range(20))
        killing = threading.Thread(target=cluster.kill, args=("contributor", 2))
        killing.start()
        assert text + "".join(pieces) == undisturbed
        killing.join()
        client.undeploy("llama")


def test_each_container_may_do_only_what_it_needs(cluster: Cluster) -> None:
    for service, user in (("server", "0"), ("contributor", "1000")):
        name = cluster.container(service)
        output = cluster.engine.run("exec", name, "sh", "-c", "id -u; cat /proc/self/status")
        assert output.split()[0] == user
        facts = dict(line.split(":\t", 1) for line in output.splitlines()[1:])
        assert facts["NoNewPrivs"] == "1"
        assert (int(facts["CapBnd"], 16) == 0) == (service == "contributor")
    head = "for p in /proc/[0-9]*; do if grep -qsx gcs_server $p/comm; then stat -c %U $p; fi; done"
    server = cluster.container("server")
    assert cluster.engine.run("exec", server, "sh", "-c", head).split() == ["share-compute"]
    health = cluster.engine.run("exec", server, "share-compute", "status")
    assert "postgresql" in health
