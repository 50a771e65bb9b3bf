"""Shared code of the training benchmarks: a small Ray cluster, and blocks of steps of share-compute and of a rival.

Both are resident and take turns, one block each, so that other load of the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.multiprocessing as mp

from share_compute_actors.machine.launch import RAY_SETTINGS

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # because rivals are not niced either
os.environ.update(RAY_SETTINGS)

from share_compute.lifecycle.attempt_events import Assignment, AttemptEvent, StepCommitted
from share_compute.models.factory import dissect
from share_compute.planning.planner import Solution, solve
from share_compute.specification import TrainJob, parse_job
from share_compute.topology import Contributor, Device, Topology

Result = TypeVar("Result")
LAYERS = 8
PROCESSOR = Device("cpu", "cpu", 4 * 2**30)
"""Device of machines that compute on a CPU, without its speed."""
VOCABULARY = 8192


def job(folder: Path, steps: int, **parallelism: Any) -> TrainJob:
    """Return the job that both sides train: Llama architecture, 10 M parameters, batch 16 x 128, AdamW, float32.

    Args:
        folder: folder for the corpus.
        steps: number of steps.
        parallelism: fields of the job's ``parallelism``.
    """
    return parse_job(
        {
            "name": "benchmark",
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 256,
                    "intermediate_size": 688,
                    "num_hidden_layers": LAYERS,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "vocab_size": VOCABULARY,
                    "max_position_embeddings": 256,
                    "tie_word_embeddings": False,
                }
            },
            "data": {"files": [str(corpus(folder))], "validation_fraction": 0, "test_fraction": 0},
            "tokenizer": {"vocab_size": VOCABULARY},
            "training": {
                "steps": steps,
                "batch_size": 16,
                "microbatches": 4,
                "sequence_length": 128,
                "optimizer": {"name": "adamw", "learning_rate": 3e-4, "weight_decay": 0.01},
                "schedule": {"name": "constant"},
                "max_gradient_norm": None,
            },
            "parallelism": parallelism,
        }
    )


def corpus(folder: Path, size: int = 3_000_000) -> Path:
    """Write Python's own standard library to one text file of about ``size`` characters."""
    target = folder / "corpus.txt"
    if not target.exists():
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        target.write_text("\n".join(file.read_text(errors="replace") for file in sources)[:size])
    return target


@contextmanager
def cluster(nodes: int) -> Iterator[list[str]]:
    """Start a head and ``nodes`` raylets with one thread each on this machine; yield the ids of the nodes."""
    with start_cluster() as local:
        yield [local.add_node(num_cpus=1, object_store_memory=80 * 2**20).node_id for _ in range(nodes)]


@contextmanager
def start_cluster() -> Iterator[Any]:
    """Start a head on this machine and connect to it; yield the `ray.cluster_utils.Cluster`."""
    import ray
    from ray.cluster_utils import Cluster

    from share_compute_actors.machine.ray_start import leave_out_agents

    leave_out_agents()
    with tempfile.TemporaryDirectory(prefix="sc-", dir="/tmp") as short:
        os.environ["RAY_TMPDIR"] = short
        local = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "no_monitor": True,
                "object_store_memory": 100 * 2**20,
            },
        )
        try:
            ray.init(address=local.address, logging_level=logging.WARNING)
            yield local
        finally:
            ray.shutdown()
            local.shutdown()


class Ours:
    """Members of share-compute that run blocks of steps, as under a coordinator.

    Args:
        spec: the job.
        folder: folder of the job.
        node_ids: Ray's ids of the nodes, one for each machine.
        speeds: FLOP/s that each machine reports.
        device: device that each machine reports, apart from its speed.
    """

    def __init__(
        self,
        spec: TrainJob,
        folder: Path,
        node_ids: list[str],
        speeds: list[float],
        device: Device = PROCESSOR,
    ) -> None:
        from share_compute_actors.group.answering import ask_shard_store
        from share_compute_actors.training.shard_store import FACTS, ShardStore

        topology = Topology(
            tuple(
                Contributor(
                    id=f"c{index}",
                    name=f"machine-{index}",
                    devices=(replace(device, flops_per_s={"float32": speed}),),
                    node_id=node,
                    address="127.0.0.1",
                )
                for index, (node, speed) in enumerate(zip(node_ids, speeds, strict=True))
            )
        )
        assignment = Assignment(job_id="benchmark", attempt=1, spec=spec, topology=topology, folder=folder)
        self.shard_store = cast("Any", ShardStore).remote(assignment.model_dump_json())
        self._facts = ask_shard_store(FACTS, self.shard_store.prepare.remote())
        profile = dissect(self._facts.blueprint)
        solution = solve(spec, topology, profile, 0, {})
        self.plan = solution.plan
        self.parameters = profile.parameters
        self.config = self._facts.blueprint.config
        self.losses: list[float] = []
        self.led = lead(assignment, solution, self._facts, self.shard_store, self._record)

    def _record(self, event: AttemptEvent) -> None:
        if isinstance(event, StepCommitted):
            self.losses.append(event.loss)

    def block(self, first: int, count: int) -> float:
        """Run ``count`` steps and return the seconds they took."""
        start = time.perf_counter()
        self.led.conductor.steps(first + count - 1)
        return time.perf_counter() - start

    def close(self) -> None:
        """End the members."""
        import ray

        self.led.end()
        ray.kill(self.shard_store)


@dataclass(frozen=True)
class Led:
    """Members that this process leads as a coordinator would."""

    conductor: Any
    group: Any
    end: Callable[[], None]


def lead(
    assignment: Assignment,
    solution: Solution,
    facts: Any,
    shard_store: Any,
    report: Callable[[AttemptEvent], None],
    observe: Callable[[int, float, Any], None] = lambda _step, _seconds, _figures: None,
    group_class: Any = None,
) -> Led:
    """Start the members of a plan and load their shards; return them ready for the first step."""
    import ray

    from share_compute_actors.group.answering import ask_shard_store
    from share_compute_actors.group.control_requests import ControlRequests
    from share_compute_actors.testing.mailbox import Mailbox, forward_mail
    from share_compute_actors.training.coordinator.conductor import Conductor
    from share_compute_actors.training.coordinator.progress import Listener, TrainingProgress
    from share_compute_actors.training.membership.changes import Changes
    from share_compute_actors.training.membership.membership_planner import MembershipPlanner
    from share_compute_actors.training.membership.performance_monitor import PerformanceMonitor
    from share_compute_actors.training.membership.resharder import Resharder
    from share_compute_actors.training.membership.takeover import Start
    from share_compute_actors.training.membership.training_group import TrainingGroup
    from share_compute_actors.training.step_log import StepLog
    from share_compute_actors.wire import NOTHING

    plan, profile, requests = solution.plan, solution.cost.profile, ControlRequests()
    runs = max(plan.shares, key=len)
    ask_shard_store(NOTHING, shard_store.cut.remote(list(runs)))
    mailbox = cast("Any", Mailbox).remote()
    group = (group_class or TrainingGroup)(
        assignment,
        facts,
        shard_store,
        mailbox,
        requests.cancelled,
        runs,
        profile.tied_name,
        lambda _note: None,
    )
    group.load(plan)
    step_log = StepLog(assignment.folder, assignment.attempt)
    step_log.claim()
    step_log.rewind(facts.first_step - 1)
    progress = TrainingProgress(assignment.spec, facts.state, report)

    class Reports(Listener):
        """Reports steps, without search for better plans or shares."""

        def account(self, step: int, verdict: Any, figures: Any) -> Any:
            return progress.account(step, verdict, figures)

        def committed(self, facts: Any, figures: Any) -> None:
            progress.committed(facts, figures)
            observe(facts.event.step, facts.event.seconds, figures)

        def reformed(self, *_epoch: Any) -> None:
            pass

        def ticked(self) -> None:
            pass

    changes = Changes(group, requests, report)
    monitor = PerformanceMonitor(assignment, solution, report, changes)
    start = Start(facts, solution, runs, facts.state)
    resharder = Resharder(
        group, facts.first_step, shares_optimizer=assignment.spec.parallelism.shares_optimizer
    )
    planner = MembershipPlanner(assignment, start, changes, resharder, step_log, monitor, report)
    inbox = forward_mail(mailbox)
    conductor = Conductor(
        group, step_log, planner, Reports(), inbox, assignment.spec.training, changes, report
    )
    conductor.assemble()

    def end() -> None:
        group.dismiss()
        ray.kill(mailbox)
        step_log.close()

    return Led(conductor, group, end)


class Rival:
    """Processes of plain torch.distributed that run blocks of steps on request."""

    def __init__(self, worker: Callable[..., None], world: int, *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        with tempfile.NamedTemporaryFile(prefix="sc-store-", delete=False) as store:
            self._store = Path(store.name)
        self._store.unlink()
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=worker, args=(rank, world, str(self._store), there, *arguments))
            process.start()
            self._ends.append(here)
            self._processes.append(process)
        for end in self._ends:
            end.recv()  # the process reports that it is ready

    def block(self, first: int, count: int) -> tuple[float, list[float]]:
        """Run ``count`` steps; return the seconds and the losses of the last process.

        The samples are read before the clock starts, because share-compute prefetches them too.
        """
        for end in self._ends:
            end.send((first, count))
        for end in self._ends:
            end.recv()
        start = time.perf_counter()
        for end in self._ends:
            end.send("go")
        losses = [end.recv() for end in self._ends]
        return time.perf_counter() - start, losses[-1]

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            with suppress(OSError):  # the process failed, and has reported that
                end.send(None)
        for process in self._processes:
            process.join()
        self._store.unlink(missing_ok=True)


def rows(folder: str, text: str) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return step -> (inputs, targets), each ``[batch, seq]``: the same samples that share-compute trains on."""
    from share_compute.data import StepOrder, prepare

    spec = TrainJob.model_validate_json(text)
    samples = prepare(spec, Path(folder) / "data").samples
    order = StepOrder(spec.training.seed, samples.size("train"), spec.training.batch_size)

    def take(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = samples.take("train", order.indices(step))
        return torch.tensor(inputs), torch.tensor(targets)

    return take


def reported_blocks(
    end: Connection, take: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the samples of each block of steps that the driver requests of a rival's process, when it says go."""
    end.send("ready")
    while (block := end.recv()) is not None:
        samples = [take(step) for step in range(block[0], sum(block))]
        end.send("loaded")
        end.recv()
        yield samples


class Peer(Protocol):
    """The other side of a comparison."""

    def block(self, first: int, count: int) -> tuple[float, list[float]]:
        """Run ``count`` steps; return the seconds and the losses."""


def compare(
    name: str, peer_name: str, ours: Ours, rival: Peer, spec: TrainJob, options: argparse.Namespace
) -> None:
    """Run both sides in turn and print the figure."""
    tokens = spec.training.batch_size * spec.training.sequence_length
    own: list[float] = []
    other: list[float] = []
    gap = 0.0
    for turn in range(options.blocks + 1):
        first = turn * options.steps + 1
        seconds = ours.block(first, options.steps)
        rival_seconds, losses = rival.block(first, options.steps)
        gap = max(gap, *(abs(a - b) for a, b in zip(ours.losses[-options.steps :], losses, strict=True)))
        if turn:  # the first block is warm-up
            own.append(tokens * options.steps / seconds)
            other.append(tokens * options.steps / rival_seconds)
    print_speeds(
        name,
        own,
        other,
        peer_name=peer_name,
        blocks=options.blocks,
        steps_per_block=options.steps,
        parameters=ours.parameters,
        largest_loss_difference=gap,
    )


class Turns(NamedTuple):
    """Blocks of several rivals that took turns."""

    speeds: dict[str, list[float]]
    """Tokens/s of each block after the first one, by side."""
    pairs: list[tuple[float, float]]
    """Numbers that ``one rank`` and another side reported of the same step, in all blocks."""


def take_turns(rivals: Mapping[str, Rival], step_tokens: int, options: argparse.Namespace) -> Turns:
    """Run blocks of all rivals in turn, and end the rivals; one of them is ``one rank``."""
    turns = Turns({side: [] for side in rivals}, [])
    try:
        for turn in range(options.blocks + 1):
            reported: dict[str, list[float]] = {}
            for side, rival in rivals.items():
                seconds, reported[side] = rival.block(turn * options.steps + 1, options.steps)
                if turn:  # the first block is warm-up
                    turns.speeds[side].append(step_tokens * options.steps / seconds)
            for values in reported.values():
                turns.pairs.extend(zip(reported["one rank"], values, strict=True))
    finally:
        for rival in rivals.values():
            rival.close()
    return turns


def print_speeds(
    figure: str, own: Sequence[float], other: Sequence[float], *, peer_name: str, **more: Any
) -> None:
    """Print a figure of the tokens/s in blocks of two sides that took turns."""
    print_figure(
        figure,
        ours=statistics.median(own),
        peer=statistics.median(other),
        peer_name=peer_name,
        ratio=statistics.median(a / b for a, b in zip(own, other, strict=True)),
        unit="tokens/s",
        ours_range=[round(min(own)), round(max(own))],
        peer_range=[round(min(other)), round(max(other))],
        **more,
    )


def print_turns(figure: str, turns: Turns, peer: str, options: argparse.Namespace, **more: Any) -> None:
    """Print a figure of the tokens/s of ``ours`` and of another side of `take_turns`."""
    speeds = turns.speeds
    print_speeds(figure, speeds["ours"], speeds[peer], peer_name=peer, blocks=options.blocks, **more)


def print_figure(
    figure: str, *, ours: float, peer: float, peer_name: str, ratio: float, unit: str, **more: Any
) -> None:
    """Print one line of JSON; ``ratio`` is at least 1 if share-compute is ahead or the goal is reached."""
    line = {"figure": figure, "ours": round(ours, 3), "peer": round(peer, 3), "peer_name": peer_name}
    print(json.dumps({**line, "ratio": round(ratio, 3), "unit": unit, **more}), flush=True)


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of a call, and the CPU milliseconds that it took on this thread."""
    start_s = time.thread_time()
    result = call()
    return result, 1000 * (time.thread_time() - start_s)


def arguments(description: str) -> argparse.Namespace:
    """Return the parsed options that all training benchmarks take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smoke run: two short blocks")
    parser.add_argument("--blocks", type=int, default=8, help="turns of each side")
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn")
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.steps = 2, 2
    return options
