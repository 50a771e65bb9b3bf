"""Deployments on a small Ray cluster, started as by the control plane, and their streams with times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from share_compute.inference.scheduler.events import (
    Embedded,
    Emitted,
    Failed,
    Finished,
    SequenceEvent,
    read_events,
)
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import ServingStatus
from share_compute.specification import ServeJob
from share_compute.topology import Topology

Prompt = Sequence[int]
DEADLINE_S = 300.0


def make_model(folder: Path, **config: Any) -> int:
    """Write a Llama with untrained weights to a folder; return its number of parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config), dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def with_threads(topology: Topology, threads: int) -> Topology:
    """Return the same machines with ``threads`` CPU threads each."""
    return Topology(tuple(replace(machine, cpu_threads=threads) for machine in topology.contributors))


@dataclass
class Streams:
    """Results of the sequences of one call."""

    sequences: range
    begun_s: float
    tokens: dict[int, list[int]] = field(default_factory=dict)
    times_s: dict[int, list[float]] = field(default_factory=dict)
    """Seconds from the request to the arrival of each token, by sequence."""
    ends: dict[int, Finished | Failed | Embedded] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Return whether all sequences have ended."""
        return len(self.ends) == len(self.sequences)

    @property
    def seconds(self) -> float:
        """Return the seconds from the call to the last token."""
        return max(times[-1] for times in self.times_s.values())

    @property
    def texts(self) -> list[list[int]]:
        """Return the tokens of each sequence."""
        return [self.tokens.get(sequence, []) for sequence in self.sequences]

    def record(self, event: SequenceEvent, now_s: float) -> None:
        """Record an event; raise RuntimeError if a token is repeated or missing."""
        if not isinstance(event, Emitted):
            self.ends[event.sequence] = event
            return
        known = self.tokens.setdefault(event.sequence, [])
        if event.index != len(known):
            raise RuntimeError(f"sequence {event.sequence}: token {event.index} came as number {len(known)}")
        known.append(event.token)
        self.times_s.setdefault(event.sequence, []).append(now_s - self.begun_s)


class Served:
    """One replica, with its server.

    Args:
        folder: folder of the model.
        topology: machines that it may use.
        window: maximum number of tokens of a prompt and its answer together.
        wanted: further fields of the deployment's specification.
    """

    def __init__(self, folder: Path, topology: Topology, window: int, **wanted: Any) -> None:
        from share_compute_actors.inference.assignment import ServingAssignment
        from share_compute_actors.inference.server import DeploymentServer

        spec = ServeJob.model_validate({"name": "benchmark", "model": {"path": str(folder)}, **wanted})
        assignment = ServingAssignment(
            deployment_id=f"dep-{time.monotonic_ns()}",
            spec=spec,
            folder=folder,
            window_tokens=window,
            topology=topology,
        )
        self.topology = topology
        self.server = DeploymentServer.remote(assignment.model_dump_json())  # type: ignore[attr-defined]
        self._running = self.server.run.remote()
        self._received = 0
        self._next = 0

    def status(self) -> ServingStatus:
        """Return the status of the deployment."""
        import ray

        return ServingStatus.model_validate_json(ray.get(self.server.status.remote()))

    def pids(self) -> list[int]:
        """Return the process ids of the server and of its members, which all run on this machine."""
        from ray._private import state  # Ray's public functions need its dashboard

        server = state.actors(self.server._actor_id.hex())["Pid"]  # noqa: SLF001 - Ray has no other name for it
        members = [stage.process_id for stage in self.status().stages]
        return [server, *(pid for pid in members if pid is not None)]

    def wait_for(self, stages: int) -> ServingStatus:
        """Wait until it is ready with ``stages`` stages; return its status."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            status = self.status()
            if status.state is DeploymentState.ready and len(status.stages) == stages:
                return status
            if status.state is DeploymentState.failed or time.monotonic() > deadline:
                raise RuntimeError(f"{stages} stages were asked for: {status}")
            time.sleep(0.1)

    def offer(self, topology: Topology) -> None:
        """Replace the machines that it may use."""
        import ray

        from share_compute_actors.inference.server import topologies

        self.topology = topology
        ray.get(self.server.offer.remote(topologies.dump_json(topology).decode()))

    def submit(
        self, prompts: Sequence[Prompt], count: int, *, owners: Sequence[str] = ("key",), seed: int = 0
    ) -> Streams:
        """Request ``count`` greedily decoded tokens after each prompt; prompts are assigned to owners in turn."""
        import ray

        from share_compute_actors.inference.server import generations_adapter
        from share_compute_actors.wire import NOTHING, unpack_answer

        options = SamplingOptions(temperature=0, seed=seed, max_tokens=count)
        sequences = range(self._next, self._next + len(prompts))
        generations = [
            Generation(
                sequence=sequence,
                owner=owners[place % len(owners)],
                prompt=tuple(prompt),
                options=options,
            )
            for place, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True))
        ]
        streams = Streams(sequences, time.perf_counter())
        answer = ray.get(self.server.submit.remote(generations_adapter.dump_json(generations).decode()))
        unpack_answer(NOTHING, answer, "the server")
        self._next = sequences.stop
        return streams

    def pull(self) -> list[SequenceEvent]:
        """Return the events since the last call; wait a short time for some."""
        import ray

        events = read_events(ray.get(self.server.pull.remote(self._received, 1.0)))
        self._received += len(events)
        return events

    def follow(self, streams: Streams, until: Callable[[], bool] | None = None) -> Streams:
        """Receive events until these sequences have ended, or ``until`` returns True; return ``streams``."""
        deadline = time.monotonic() + DEADLINE_S
        while not (streams.has_ended if until is None else until()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end of {streams.sequences}: {self.status()}")
            for event in self.pull():
                streams.record(event, time.perf_counter())
        return streams

    def close(self) -> None:
        """End the deployment with its members."""
        import ray

        ray.get(self.server.stop.remote())
        ray.get(self._running, timeout=DEADLINE_S)
        ray.kill(self.server)
