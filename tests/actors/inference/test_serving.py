"""Deployments over real processes: the tokens are those of transformers, whichever processes die."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.exceptions import RayActorError
from tests import programs
from tests.platform.inference.runtime.stages import CPU, Serving, opening
from tests.ray_nodes import title

from share_compute.errors import TooLong
from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.scheduler.events import Embedded, Emitted, Finished, SequenceEvent, read_events
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.models.devices import operations
from share_compute.models.huggingface.encoder_types import Pooling
from share_compute.shards import Shard
from share_compute.specification import ServeJob
from share_compute.topology import Device, Topology
from share_compute_actors.inference.assignment import ServingAssignment
from share_compute_actors.inference.server import DeploymentServer, generations_adapter, topologies
from share_compute_actors.wire import NOTHING, unpack_answer

pytestmark = pytest.mark.slow
LAYERS = 6
WINDOW = 512
DEADLINE_S = 120.0
COMPILING_S = 600.0
"""Deadline where members compile, which takes minutes on a busy machine."""
PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9, 8], [30, 31, 32, 33]]
DRAWN: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.05,
    "logit_bias": tuple((token, -100 if token % 2 else 0.5) for token in range(60)),
    "stop_token_ids": (100, 200),
    "min_tokens": 110,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), "llama")


def saved(folder: Path, model_type: str, **options: Any) -> Path:
    """Write a model with random weights, and return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
        **options,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[list[int], int], list[int]]:
    return generator(folder, CPU)


def generator(folder: Path, device: torch.device) -> Callable[[list[int], int], list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)

    def generate(prompt: list[int], count: int) -> list[int]:
        whole = model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=device),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = whole[0, len(prompt) :].tolist()
        return tokens

    return generate


@dataclass
class Served:
    """A deployment's server, and all events that it reported."""

    server: Any
    num_pulled: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, SequenceEvent] = field(default_factory=dict)

    def submit(self, first: int, prompts: list[list[int]], count: int, **rules: Any) -> range:
        options = SamplingOptions(**{"temperature": 0.0, "seed": 11, "max_tokens": count, **rules})
        sequences = range(first, first + len(prompts))
        generations = [
            Generation(sequence=sequence, owner="key", prompt=tuple(prompt), options=options)
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        document = generations_adapter.dump_json(generations).decode()
        answer = ray.get(self.server.submit.remote(document))
        unpack_answer(NOTHING, answer, "the server")
        return sequences

    def status(self) -> ServingStatus:
        return ServingStatus.model_validate_json(ray.get(self.server.status.remote()))

    def pull_until(self, reached: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not reached():
            assert time.monotonic() < deadline, f"{self.status()} {self.ends}"
            events = read_events(ray.get(self.server.pull.remote(self.num_pulled, 1.0)))
            self.num_pulled += len(events)
            for event in events:
                if isinstance(event, Emitted):
                    known = self.tokens.setdefault(event.sequence, [])
                    assert event.index == len(known)  # no token is lost or repeated
                    known.append(event.token)
                else:
                    self.ends[event.sequence] = event

    def wait_for_stages(self, stages: int) -> ServingStatus:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            status = self.status()
            if (
                status.state is DeploymentState.ready
                and len(status.stages) == stages
                and all(
                    stage.process_id is not None for stage in status.stages
                )  # known from the stage's first heartbeat
            ):
                return status
            assert time.monotonic() < deadline, status
            self.pull_until(lambda: True)

    def has(self, sequence: int, count: int) -> bool:
        return len(self.tokens.get(sequence, ())) >= count

    def have_ended(self, sequences: range) -> bool:
        return set(sequences) <= self.ends.keys()


@pytest.fixture
def serve(topology: Topology, folder: Path) -> Iterator[Callable[..., Served]]:
    started: list[tuple[Any, Any]] = []

    def start(wanted: dict[str, Any], **facts: Any) -> Served:
        """Start a server; ``facts`` replace fields of its `ServingAssignment`."""
        spec = ServeJob.model_validate({"name": "tiny", "model": {"path": str(folder)}, **wanted})
        known = {"folder": folder, "window_tokens": WINDOW, "topology": topology}
        assignment = ServingAssignment(deployment_id="dep-test", spec=spec, **{**known, **facts})
        server = DeploymentServer.remote(assignment.model_dump_json())
        started.append((server, server.run.remote()))
        return Served(server)

    yield start
    for server, run in started:
        with suppress(RayActorError):  # the test killed it
            ray.get(server.stop.remote())
            ray.get(run, timeout=DEADLINE_S)
            ray.kill(server)


def _went_on_without(status: ServingStatus, name: str) -> None:
    assert status.recoveries == 1
    assert status.last_gap_s is not None
    (interruption,) = status.interruptions
    assert interruption.machines == (name,)
    assert interruption.seconds is not None
    assert 0 < interruption.seconds <= interruption.ago_s


@pytest.mark.real_path
def test_the_tokens_are_those_of_transformers_whatever_dies_on_the_way(
    serve: Callable[..., Served],
    topology: Topology,
    expected: Callable[[list[int], int], list[int]],
) -> None:
    served = serve({"parallelism": {"stages": 3}, "new_tokens": 8})  # caches grow again and again
    # Asked for before there are any stages.
    first = served.submit(0, PROMPTS, 24)
    with pytest.raises(TooLong):
        served.submit(10, [[1] * WINDOW], 1)
    served.pull_until(lambda: served.have_ended(first))
    for sequence in first:
        assert served.tokens[sequence] == expected(PROMPTS[sequence], 24)
    status = served.wait_for_stages(3)
    assert (status.stages[0].start, status.stages[-1].stop) == (0, LAYERS)
    assert status.prediction is not None
    drawn = served.submit(20, PROMPTS[:1], 120, **DRAWN)
    served.pull_until(lambda: served.have_ended(drawn))

    # A member is killed while four texts are generated: all sequences continue.
    count = 160
    four, again = served.submit(30, PROMPTS, count), served.submit(40, PROMPTS[:1], 120, **DRAWN)
    served.pull_until(lambda: served.has(30, 40) and served.has(40, 30))
    killed = served.status().stages[1]
    assert killed.process_id is not None
    left = tuple(
        topology[stage.contributor_id]
        for stage in status.stages
        if stage.contributor_id != killed.contributor_id
    )
    os.kill(killed.process_id, signal.SIGKILL)
    # If the offer came before the loss is noticed, the machine would count as removed, and not as lost.
    served.pull_until(lambda: served.status().recoveries == 1)
    ray.get(served.server.offer.remote(topologies.dump_json(Topology(left)).decode()))
    served.pull_until(lambda: served.have_ended(four) and served.have_ended(again))
    for sequence, prompt in zip(four, PROMPTS, strict=True):
        end = served.ends[sequence]
        assert isinstance(end, Finished)
        assert (end.reason, end.new_tokens) == ("length", count)
        assert served.tokens[sequence] == expected(prompt, count)
    assert served.tokens[40] == served.tokens[20]
    assert not any(token < 60 and token % 2 for token in served.tokens[20])
    status = served.wait_for_stages(2)
    _went_on_without(status, killed.name)
    assert killed.contributor_id not in {stage.contributor_id for stage in status.stages}

    # One member is stopped: the others continue without it.
    long = served.submit(50, PROMPTS[1:3], 120)
    served.pull_until(lambda: served.has(50, 30))
    process_id = status.stages[0].process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGSTOP)
    try:
        served.pull_until(lambda: served.have_ended(long))
        status = served.wait_for_stages(1)
    finally:
        os.kill(process_id, signal.SIGCONT)
    for sequence, prompt in zip(long, PROMPTS[1:3], strict=True):
        assert served.tokens[sequence] == expected(prompt, 120)
    assert status.recoveries == 2

    # Cancelled sequences free their KV capacity.
    unwanted = served.submit(60, PROMPTS, 400)
    served.pull_until(lambda: served.has(63, 5))
    assert served.status().queue.kv_tokens_used > 0
    ray.get(served.server.cancel.remote(list(unwanted)))
    served.pull_until(lambda: served.have_ended(unwanted))
    assert {served.ends[sequence].reason for sequence in unwanted} == {"cancelled"}  # type: ignore[union-attr]
    assert served.status().queue.kv_tokens_used == 0


def test_members_go_on_with_another_server_when_theirs_is_killed(
    serve: Callable[..., Served], expected: Callable[[list[int], int], list[int]]
) -> None:
    def processes(served: Served) -> list[int | None]:
        return [stage.process_id for stage in served.wait_for_stages(2).stages]

    two = {"parallelism": {"stages": 2}}
    first = serve(two)
    members = processes(first)
    sequences = first.submit(0, PROMPTS, 400)
    first.pull_until(lambda: first.has(0, 10))  # the members are computing when their server dies
    ray.kill(first.server)
    second = serve(two)
    sequences = second.submit(0, PROMPTS, 24)
    second.pull_until(lambda: second.have_ended(sequences))
    for sequence in sequences:
        assert second.tokens[sequence] == expected(PROMPTS[sequence], 24)
    assert processes(second) == members

    # Members that were started with another setup are replaced.
    ray.kill(second.server)
    third = serve({**two, "dtype": "bfloat16"})
    assert set(processes(third)).isdisjoint(members)
    for process in members:
        assert process is not None
        assert not psutil.pid_exists(process)


def test_weights_in_int8_are_loaded_as_such_and_give_the_same_tokens_over_stages(
    serve: Callable[..., Served], topology: Topology, folder: Path
) -> None:
    stage = ServingStage(
        json.loads((folder / "config.json").read_text()), Shard("m", 0, LAYERS, LAYERS), CPU, quantizes=True
    )
    stage.load(folder)
    alone = Serving([stage])
    served = serve({"dtype": "int8", "parallelism": {"stages": 2}})
    status = served.wait_for_stages(2)
    first = served.submit(0, PROMPTS, 120)
    served.pull_until(lambda: served.has(0, 20))
    killed = status.stages[1]
    assert killed.process_id is not None
    os.kill(killed.process_id, signal.SIGKILL)
    left = [machine for machine in topology.contributors if machine.id != killed.contributor_id]
    ray.get(served.server.offer.remote(topologies.dump_json(Topology(tuple(left))).decode()))
    served.pull_until(lambda: served.have_ended(first))
    for sequence, prompt in zip(first, PROMPTS, strict=True):
        request = replace(opening(sequence, prompt), capacity_tokens=WINDOW)
        assert served.tokens[sequence] == alone.run({request: [len(prompt)]}, 120)[sequence]
    assert served.status().recoveries == 1


@pytest.mark.exact
def test_a_deployment_with_compiled_code_goes_on_with_the_same_tokens_after_a_loss(
    serve: Callable[..., Served],
) -> None:
    programs.require("g++")
    served = serve({"compile": "on", "parallelism": {"stages": 2}})
    alone = served.submit(0, PROMPTS[:1], 120, **DRAWN)
    served.pull_until(lambda: served.status().proposed_computation is not None, COMPILING_S)
    proposed = served.status().proposed_computation
    assert proposed is not None
    assert proposed.is_compiled, proposed
    assert proposed.gain is not None
    assert 0 not in served.tokens  # nothing is computed before the choice is stored
    ray.get(served.server.choose_computation.remote(proposed.model_dump_json()))
    served.pull_until(lambda: served.have_ended(alone), COMPILING_S)
    status = served.wait_for_stages(2)
    assert status.proposed_computation is None
    again = served.submit(10, PROMPTS[:1], 120, **DRAWN)
    served.pull_until(lambda: served.has(10, 20))
    killed = status.stages[1]
    assert killed.process_id is not None
    os.kill(killed.process_id, signal.SIGKILL)
    served.pull_until(lambda: served.have_ended(again), COMPILING_S)
    assert served.tokens[10] == served.tokens[0]
    assert served.status().recoveries == 1

    # Another server of the replica knows the choice, and takes over the members.
    members = [stage.process_id for stage in served.wait_for_stages(2).stages]
    ray.kill(served.server)
    second = serve({"compile": "on", "parallelism": {"stages": 2}}, computation=proposed)
    last = second.submit(20, PROMPTS[:1], 120, **DRAWN)
    second.pull_until(lambda: second.have_ended(last), COMPILING_S)
    assert second.tokens[20] == served.tokens[0]
    assert [stage.process_id for stage in second.wait_for_stages(2).stages] == members


def test_a_deployment_with_ranks_goes_on_after_the_loss_of_one(
    serve: Callable[..., Served], topology: Topology, tmp_path: Path
) -> None:
    """Each rank has a device of its own, and a part of each expert of a mixture."""
    folder = saved(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    expected = generator(folder, CPU)
    machines = tuple(
        replace(machine, cpu_threads=2, devices=machine.devices * 2, ranks=2)
        for machine in topology.contributors
    )
    served = serve({"parallelism": {"stages": 2, "tensor": 2}}, folder=folder, topology=Topology(machines))
    first = served.submit(0, PROMPTS, 120)
    served.pull_until(lambda: served.has(0, 20))
    member = served.wait_for_stages(2).stages[1].process_id
    (rank,) = (child for child in psutil.Process(member).children() if "ranks" in title(child))
    rank.send_signal(signal.SIGKILL)
    served.pull_until(lambda: served.have_ended(first))
    for sequence, prompt in zip(first, PROMPTS, strict=True):
        assert served.tokens[sequence] == expected(prompt, 120)
    assert served.status().recoveries == 1
    assert not psutil.pid_exists(member or 0)


def test_the_vectors_are_those_of_transformers_whatever_dies_on_the_way(
    serve: Callable[..., Served], topology: Topology, tmp_path: Path
) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path)
    served = serve(
        {"parallelism": {"stages": 3}},
        folder=tmp_path,
        window_tokens=128,
        pooling=Pooling(is_normalized=True),
    )
    status = served.wait_for_stages(3)
    killed = status.stages[1]
    assert killed.process_id is not None
    with pytest.raises(TooLong):
        served.submit(0, [[1] * 129], 0)
    draw = Random(3)
    texts = [draw.choices(range(1, 256), k=draw.randint(1, 128)) for _ in range(1000)]
    sequences = served.submit(0, texts, 0)
    served.pull_until(lambda: len(served.ends) > 20)
    os.kill(killed.process_id, signal.SIGKILL)
    assert len(served.ends) < len(texts)
    served.pull_until(
        lambda: served.status().recoveries == 1
    )  # otherwise the offer may come first, and no member would count as lost
    left = tuple(
        topology[stage.contributor_id]
        for stage in status.stages
        if stage.contributor_id != killed.contributor_id
    )
    ray.get(served.server.offer.remote(topologies.dump_json(Topology(left)).decode()))
    served.pull_until(lambda: served.have_ended(sequences))
    for sequence in sequences[::20]:
        end = served.ends[sequence]
        assert isinstance(end, Embedded)
        with torch.no_grad():
            mean = model(torch.tensor([texts[sequence]])).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean, dim=0).numpy()
        np.testing.assert_allclose(np.frombuffer(end.vector, "<f4"), expected, atol=1e-5, rtol=0)
    assert {type(end) for end in served.ends.values()} == {Embedded}
    status = served.wait_for_stages(2)
    assert status.recoveries == 1
    assert killed.contributor_id not in {stage.contributor_id for stage in status.stages}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_tokens_on_a_gpu_are_those_of_transformers_also_after_a_death(
    serve: Callable[..., Served], topology: Topology, folder: Path
) -> None:
    gpu = torch.device("cuda")
    expected = generator(folder, gpu)
    device = Device(
        "cuda", "gpu", memory_bytes=2**31, flops_per_s={"float32": 1e10}, uuid=operations(gpu).uuid()
    )
    machines = [replace(machine, devices=(device,)) for machine in topology.contributors]
    served = serve({"parallelism": {"stages": 2}, "new_tokens": 8}, topology=Topology(tuple(machines)))
    status = served.wait_for_stages(2)
    assert ray.available_resources()["GPU"] < ray.cluster_resources()["GPU"]
    drawn = served.submit(20, PROMPTS[:1], 120, **DRAWN)
    served.pull_until(lambda: served.have_ended(drawn))
    four, again = served.submit(30, PROMPTS, 160), served.submit(40, PROMPTS[:1], 120, **DRAWN)
    served.pull_until(lambda: served.has(30, 40) and served.has(40, 30))
    killed = status.stages[1]
    assert killed.process_id is not None
    os.kill(killed.process_id, signal.SIGKILL)
    served.pull_until(lambda: served.have_ended(four) and served.have_ended(again))
    for sequence, prompt in zip(four, PROMPTS, strict=True):
        assert served.tokens[sequence] == expected(prompt, 160)
    assert served.tokens[40] == served.tokens[20]
    assert served.status().recoveries == 1
