"""A machine that sends wrong answers or data runs no code on the server, and is excluded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from tests.conftest import wait_for
from tests.ray_nodes import Attempt, on_the_head
from tests.security.machines.hostile_worker import ORDERS, Bomb, marker_of
from tests.thoroughly import thoroughly
from transformers import AutoConfig, AutoModelForCausalLM

from share_compute.inference.scheduler.events import Emitted, Failed, Finished, read_events
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.lifecycle.attempt_events import Assignment, AttemptEvent
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.specification import ServeJob, parse_job
from share_compute.topology import Topology
from share_compute_actors.group.answering import ask_shard_store
from share_compute_actors.inference.assignment import ServingAssignment
from share_compute_actors.inference.server import DeploymentServer, generations_adapter
from share_compute_actors.messages import Extent
from share_compute_actors.training.shard_store import FACTS, PROGRESS, ShardStore
from share_compute_actors.wire import NOTHING, unpack_answer

pytestmark = pytest.mark.slow

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
STEPS = 300
"""The jobs last long enough for a test to act after their third step."""
DEADLINE_S = 180.0


class Hostile:
    """A machine whose owner changed the programs on it."""

    def __init__(self, node: Any, orders: Path) -> None:
        self.node = node
        self._orders = orders

    @property
    def marker(self) -> Path:
        """Exists once some process has unpickled data from the machine."""
        return marker_of(self._orders)

    def step(self, what: str) -> None:
        """From now on, let its actors answer and send nothing but this."""
        partial = self._orders.with_suffix(".partial")
        partial.write_text(what)
        partial.replace(self._orders)


@pytest.fixture
def hostile(ray_cluster: Cluster, tmp_path: Path) -> Iterator[Hostile]:
    orders = tmp_path / "orders"
    os.environ[ORDERS] = str(orders)
    node = ray_cluster.add_node(
        num_cpus=1,
        object_store_memory=80 * 2**20,
        setup_worker_path=str(Path(__file__).with_name("hostile_worker.py")),
    )
    yield Hostile(node, orders)
    ray_cluster.remove_node(node)
    del os.environ[ORDERS]


@pytest.fixture
def both(topology: Topology, hostile: Hostile) -> Topology:
    """An honest machine and the hostile one."""
    honest = topology.contributors[0]
    return Topology((honest, replace(honest, id="evil", name="evil", node_id=hostile.node.node_id)))


def job(folder: Path, members: int) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    return {
        "model": {"config": LLAMA},
        "data": {"files": [str(text)]},
        "tokenizer": {"vocab_size": 300},
        "training": {"steps": STEPS, "batch_size": 8, "microbatches": 4, "sequence_length": 32},
        "parallelism": {"stages": 1, "members_per_stage": members},
    }


# By default, each kind of answer occurs once: half of them in a job, the others in a deployment.
@pytest.mark.parametrize("what", thoroughly(["pickles inside", "errors", "pickles", "noise"], quick=2))
def test_a_job_goes_on_without_a_hostile_member(
    attempt: Attempt, both: Topology, hostile: Hostile, tmp_path: Path, what: str
) -> None:
    def on_event(event: AttemptEvent, coordinator: Any) -> None:
        if event.type == "step" and event.step == 3:
            # The call is one that a member might make.
            bomb = Bomb(hostile.marker)
            called = [
                coordinator.receive.remote(bomb, b"", b""),
                coordinator.receive.remote("evil", b"no key", bomb),
                coordinator.receive.remote("evil", b"no key", b"Formed [null]"),
                coordinator.receive.remote("evil", b"no key", [ray.put(1)]),
                coordinator.__ray_call__.remote(print, bomb),
            ]
            assert ray.wait(called, num_returns=len(called), timeout=DEADLINE_S)[1] == []
            hostile.step(what)

    reported = attempt(job(tmp_path, members=2), machines=both, on_event=on_event)
    assert not hostile.marker.exists(), hostile.marker.read_text()
    notes = [event.message for event in reported if event.type == "note"]
    assert any(
        note.startswith("lost machine evil: evil sent a message that does not match its schema")
        for note in notes
    ), notes
    assert reported[-1].type == "ended"
    assert reported[-1].outcome == "succeeded"
    assert [event.step for event in reported if event.type == "step"] == list(range(1, STEPS + 1))
    reformed = [event for event in reported if event.type == "reformed"]
    assert reformed[0].lost == ("evil",)
    assert not any("evil" in event.joined for event in reformed)


def test_a_job_that_has_only_a_hostile_machine_fails(
    attempt: Attempt, both: Topology, hostile: Hostile, tmp_path: Path
) -> None:
    def on_event(event: AttemptEvent, _: Any) -> None:
        if event.type == "step" and event.step == 3:
            hostile.step("pickles")

    alone = Topology(both.contributors[1:])
    endless = job(tmp_path, members=1)
    endless["training"]["steps"] = 100_000
    reported = attempt(endless, machines=alone, on_event=on_event)
    assert not hostile.marker.exists(), hostile.marker.read_text()
    assert reported[-1].type == "ended"
    assert reported[-1].outcome == "failed"
    assert reported[-1].error is not None
    assert reported[-1].error["code"] == "contributor-lost"


def test_a_snapshot_of_a_hostile_member_is_not_saved(
    attempt: Attempt, both: Topology, hostile: Hostile, tmp_path: Path
) -> None:
    """The first member of the stage is the hostile one: the shard store fetches the result from it."""

    def on_event(event: AttemptEvent, _: Any) -> None:
        if event.type == "step" and event.step == STEPS:
            hostile.step("pickles")

    reported = attempt(
        job(tmp_path, members=2), machines=Topology(both.contributors[::-1]), on_event=on_event
    )
    assert not hostile.marker.exists(), hostile.marker.read_text()
    assert reported[-1].type == "ended"
    assert reported[-1].outcome == "succeeded"


def test_the_shard_store_reads_no_pickle(ray_cluster: Cluster, tmp_path: Path) -> None:
    del ray_cluster
    spec = parse_job(job(tmp_path, members=1))
    assignment = Assignment(job_id="job-1", attempt=1, spec=spec, topology=Topology(()), folder=tmp_path)
    shard_store = ShardStore.options(scheduling_strategy=on_the_head()).remote(assignment.model_dump_json())
    facts = ask_shard_store(FACTS, shard_store.prepare.remote())
    ask_shard_store(NOTHING, shard_store.cut.remote([2, 2]))
    bomb = Bomb(tmp_path / "marker")
    for call in (
        shard_store.train_rows.remote(bomb, [0], "inputs"),
        shard_store.train_rows.remote(1, [bomb], "inputs"),
        shard_store.weights.remote(bomb),
        shard_store.weights.remote([Extent("lm_head", 0, None)]),
        shard_store.text.remote([ray.put(1)]),
        shard_store.text.remote([shard_store]),
        shard_store.__ray_call__.remote(len, 1),
        # The exceptions to retry on are a pickle, too, which is read when the call fails.
        shard_store.train_rows.options(max_task_retries=1, retry_exceptions=[ValueError]).remote(
            "x", [0], "inputs"
        ),
    ):
        with pytest.raises(RayError):
            ray.get(call, timeout=DEADLINE_S)
    assert not (tmp_path / "marker").exists()
    assert facts.sizes["train"]
    assert ask_shard_store(PROGRESS, shard_store.progress.remote())
    assert set(ray.get(shard_store.train_rows.remote(1, [0], "inputs"))) == {0}
    ray.kill(shard_store)


# -- serving -------------------------------------------------------------------------------------------------------

COUNT = 110
PROMPTS = ([1, 5, 9], [2, 4, 8, 16])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Topology], Any]]:
    folder = tmp_path / "model"
    config = AutoConfig.for_model(**LLAMA, vocab_size=300)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    started: list[tuple[Any, Any]] = []

    def start(machines: Topology) -> Any:
        parallelism = {"parallelism": {"stages": len(machines.contributors)}}
        spec = ServeJob.model_validate({"name": "tiny", "model": {"path": str(folder)}, **parallelism})
        assignment = ServingAssignment(
            deployment_id="dep-evil", spec=spec, folder=folder, window_tokens=128, topology=machines
        )
        server = DeploymentServer.options(scheduling_strategy=on_the_head()).remote(
            assignment.model_dump_json()
        )
        started.append((server, server.run.remote()))
        return server

    yield start
    for server, run in started:
        ray.get(server.stop.remote())
        ray.get(run, timeout=DEADLINE_S)
        ray.kill(server)


def _status(server: Any) -> ServingStatus:
    return ServingStatus.model_validate_json(ray.get(server.status.remote(), timeout=DEADLINE_S))


@pytest.mark.parametrize("what", ["pickles", "noise"])
def test_a_deployment_goes_on_without_a_hostile_member(
    serve: Callable[[Topology], Any], both: Topology, hostile: Hostile, what: str
) -> None:
    server = serve(both)
    options = SamplingOptions(temperature=0, seed=3, max_tokens=COUNT)
    generations = [
        Generation(sequence=number, owner="key", prompt=tuple(prompt), options=options)
        for number, prompt in enumerate(PROMPTS)
    ]
    bomb = Bomb(hostile.marker)
    called = [
        server.submit.remote(bomb),
        server.receive.remote("evil", b"", [bomb]),
        server.cancel.remote([bomb]),
    ]
    assert ray.wait(called, num_returns=len(called), timeout=DEADLINE_S)[1] == []
    wait_for(lambda: len(_status(server).stages) == 2, "both stages")
    unpack_answer(
        NOTHING,
        ray.get(server.submit.remote(generations_adapter.dump_json(generations).decode())),
        "the server",
    )
    tokens: dict[int, int] = dict.fromkeys(range(len(PROMPTS)), 0)
    num_pulled, open_sequences, is_turned = 0, set(tokens), False
    deadline = time.monotonic() + DEADLINE_S
    while open_sequences:
        assert time.monotonic() < deadline, _status(server)
        news = read_events(ray.get(server.pull.remote(num_pulled, 1.0)))
        num_pulled += len(news)
        for event in news:
            assert not isinstance(event, Failed), event
            if isinstance(event, Emitted):
                tokens[event.sequence] += 1
            if isinstance(event, Finished):
                open_sequences.discard(event.sequence)
        if not is_turned and any(tokens.values()):
            is_turned = True
            assert len(_status(server).stages) == 2
            hostile.step(what)
    assert is_turned
    assert not hostile.marker.exists(), hostile.marker.read_text()
    assert set(tokens.values()) == {COUNT}
    while not (status := _status(server)).recoveries or status.state is not DeploymentState.ready:
        assert time.monotonic() < deadline, status
    assert [stage.name for stage in status.stages] == [both.contributors[0].name]
