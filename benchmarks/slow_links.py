"""Measure rounds over slow links: bytes, loss, utilisation, and the stall when the machine of a branch dies.

A job with ``synchronization: {kind: local, branches: 4}`` trains on four islands of one machine each; ``--branches``
sets another number. The settings are those of SparseLoCo (arXiv 2508.15706): ``preset: sparse_loco`` with its
compression. Figures:

- ``bytes_per_step_vs_ddp``: bytes that one branch sends and receives per step, from the events of jobs with 10 M
  parameters. The peer is DistributedDataParallel (DDP) with two workers: each sends and receives the float32 gradient
  once in a step. With more workers, DDP moves more. Heartbeats of both sides are left out; headers of files count.
  ``bytes_per_step_curve`` is the same for other densities and lengths of rounds. It is computed, not measured: the
  codecs return exact sizes.
- ``validation_loss_vs_sync``: validation loss of rounds over that of synchronous AllReduce on the same machines,
  after the same number of tokens, with the same total batch and the same other settings. As in DiLoCo (arXiv
  2311.08105), both begin with weights that were trained synchronously; ``--from-scratch`` leaves these steps out. The
  model has 0.2 M parameters because 10 M would train for hours on two cores.
- ``utilisation``: tokens/s of the islands that merge over slow links, with 10 M parameters, rounds of 50 steps and 8
  x 128 tokens in a step of each branch. The peer is the same job with one round that is longer than the measurement,
  so the islands never meet. ``utilisation_with_overlap`` is the same with ``overlap: 4``.
- ``island_loss_stall_s``: with a ``quorum`` of all branches but one and ``grace_s: 2``, all processes of one island's
  machine are killed in the middle of a round. The stall is the longest time between two committed steps of another
  branch. The peer is the goal, the grace period and one second.
- ``tokens_per_s_vs_ddp_powersgd``: tokens/s of the rounds. The peer is DDP with torch's PowerSGD hook of rank 1 over
  the same links. Both take turns.

For the last three figures, the server and all machines have network namespaces of their own (`tests/hosts`), so they
need Linux and root. A user-space relay delays the frames of each machine by 25 ms in each direction and limits their
rate to 20 Mbit/s; many kernels lack ``tc netem``. The machines, the server and the relays share the cores of this
host, so the islands compute more slowly while the server merges than they would on hosts of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from _attempts import Attempt, Machines
from _harness import corpus, print_figure, print_speeds, start_cluster

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.conftest import RunningServer, ready, run_command, run_contributor, run_server, wait_for
from tests.hosts.network import Host, Network, why_not

from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.data import prepare
from share_compute.errors import Conflict
from share_compute.lifecycle.attempt_events import Assignment, AttemptEvent, RoundMerged, Validated
from share_compute.lifecycle.folders import job_folder
from share_compute.lifecycle.states import JobState
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import parse_job
from share_compute.specification.compression import SPARSE_LOCO
from share_compute_actors.training.step_log import FILE

BYTES_GOAL, LOSS_GOAL, UTILISATION_GOAL = 4000, 1.01, 0.95
OVERLAP = 4
"""Steps for which merges overlap with training in ``utilisation_with_overlap``."""
EVERY, GRACE_S, OBSERVED_S = 50, 2.0, 30.0
"""Steps in a round and grace period of the job whose machine is killed, and time of observation after the kill."""
STALL_GOAL_S = GRACE_S + 1.0
BEFORE_STEPS = 1200
"""Synchronous steps before the losses are compared."""
DELAY_S, BYTES_PER_S = 0.025, 20e6 / 8
"""Delay of each direction, and rate of each direction, of the link of a machine."""
DEADLINE_S = 1200.0
POLL_S = 0.01
"""Resolution of the times of committed steps."""
FIGURES = ("bytes", "loss", "utilisation", "stall", "powersgd")

LARGE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""10 M parameters."""
SMALL: dict[str, Any] = {
    **LARGE,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
"""0.2 M parameters."""


def job(
    model: Mapping[str, Any],
    text: Path,
    *,
    branches: int,
    batch: int,
    length: int,
    rounds: Mapping[str, Any] | None,
    **training: Any,
) -> dict[str, Any]:
    """Return the document of a job.

    Args:
        model: configuration of the model.
        text: file with the data.
        branches: number of branches, or of machines for synchronous AllReduce.
        batch: samples in a step of each branch.
        length: tokens in a sample.
        rounds: fields of ``synchronization`` beside its kind and branches. None for synchronous AllReduce with the
            total batch of the branches.
        training: further fields of ``training``.
    """
    if rounds is None:
        policy: dict[str, Any] = {"batch_size": branches * batch, "microbatches": branches}
    else:
        policy = {
            "batch_size": batch,
            "microbatches": 1,
            "synchronization": {"kind": "local", "branches": branches, "preset": "sparse_loco", **rounds},
            "compression": SPARSE_LOCO.model_dump(mode="json"),
        }
    return {
        "name": "slow-links",
        "model": {"config": dict(model)},
        "data": {"files": [str(text)], "validation_fraction": 0.02, "test_fraction": 0},
        "tokenizer": {"vocab_size": model["vocab_size"]},
        "training": {
            "sequence_length": length,
            "optimizer": _adamw(1e-3),
            **policy,
            **training,
        },
        "parallelism": {"stages": 1, "members_per_stage": 1 if rounds is not None else branches},
    }


# -- jobs on this host, without slow links -----------------------------------------------------------------------------


class Local:
    """A Ray cluster on this host, with a machine for each branch.

    Args:
        machines: the machines.
        folder: folder for the jobs.
        branches: number of branches.
    """

    def __init__(self, machines: Machines, folder: Path, branches: int) -> None:
        self.branches = branches
        self._topology = machines.topology(branches)
        self._folder = folder
        self._count = itertools.count()
        self._last = folder
        self.text = corpus(folder)

    def model(self) -> Path:
        """Return the folder of the last trained model."""
        return self._last / "artifacts" / "model"

    def train(self, document: dict[str, Any]) -> list[AttemptEvent]:
        """Train a job with the real coordinator, and return its events."""
        number = next(self._count)
        self._last = folder = self._folder / f"{number}"
        folder.mkdir()
        attempt = Attempt(
            Assignment(
                job_id=f"slow-links-{number}",
                attempt=1,
                spec=parse_job(document),
                topology=self._topology,
                folder=folder,
            )
        )
        return [event for event, _ in attempt.events()]


@contextmanager
def local_machines(branches: int) -> Iterator[Local]:
    """Start the cluster."""
    with tempfile.TemporaryDirectory() as name, start_cluster() as cluster:
        yield Local(Machines(cluster), Path(name), branches)


def shapes_of(model: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a Llama."""
    import torch

    layers = model["num_hidden_layers"]
    stage = build_stage(Blueprint(config=dict(model)), Shard("m", 0, layers, layers), torch.device("cpu"))
    return [tuple(parameter.shape) for parameter in stage.parameters().values()]


def parameters_of(shapes: Sequence[Sequence[int]]) -> int:
    """Return the number of values in tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def ddp_bytes(parameters: int) -> int:
    """Return the bytes that one of two workers of DDP sends and receives in a step."""
    return 2 * 4 * parameters


def measure_bytes(local: Local, options: argparse.Namespace) -> None:
    """Print the bytes of real jobs, and the curve."""
    parameters = parameters_of(shapes_of(LARGE))
    for every in (2,) if options.quick else (50, 30):
        rounds = 1 if options.quick else 2
        document = job(
            LARGE,
            local.text,
            branches=local.branches,
            batch=1,
            length=64,
            rounds={"every": every},
            steps=rounds * every,
        )
        merged = [event for event in local.train(document) if isinstance(event, RoundMerged)]
        sizes = {(branch.sent_bytes, event.update_bytes) for event in merged for branch in event.branches}
        moved = max(map(sum, sizes))
        ours, peer = moved / every, ddp_bytes(parameters)
        print_figure(
            "bytes_per_step_vs_ddp",
            ours=ours,
            peer=peer,
            peer_name="DDP, float32, two workers",
            ratio=peer / ours / BYTES_GOAL,
            unit="bytes/step",
            times_fewer=round(peer / ours),
            goal_times_fewer=BYTES_GOAL,
            every=every,
            density=SPARSE_LOCO.density,
            sent_and_received=sorted(sizes),
            rounds=len(merged),
            branches=local.branches,
            parameters=parameters,
        )
    print_curve(local.text, shapes_of(LARGE))


def print_curve(text: Path, shapes: Sequence[tuple[int, ...]]) -> None:
    """Print the computed bytes of a step for several densities and lengths of rounds."""
    parameters = parameters_of(shapes)
    for density in (1 / 16, 1 / 64, 0.01, 1 / 256):
        for every in (15, 30, 50, 100, 250):
            document = job(LARGE, text, branches=2, batch=1, length=64, rounds={"every": every}, steps=every)
            document["training"]["compression"]["density"] = density
            training = parse_job(document).training
            moved = sum(
                codec.num_bytes(shape)
                for codec in (codec_of_round(training, 1), codec_of_update(training, 1))
                for shape in shapes
            )
            ours, peer = moved / every, ddp_bytes(parameters)
            print_figure(
                "bytes_per_step_curve",
                ours=ours,
                peer=peer,
                peer_name="DDP, float32, two workers",
                ratio=peer / ours / BYTES_GOAL,
                unit="bytes/step, computed",
                times_fewer=round(peer / ours),
                every=every,
                density=density,
            )


def loss_of(local: Local, document: dict[str, Any]) -> float:
    """Train a job, and return the validation loss of its result."""
    events = local.train(document)
    return [event.loss for event in events if isinstance(event, Validated) and event.split == "validation"][
        -1
    ]


def measure_loss(local: Local, options: argparse.Namespace) -> None:
    """Print the ratio of validation losses."""
    seeds, before, steps = (1, 20, 60) if options.quick else (options.seeds, BEFORE_STEPS, options.loss_steps)
    size: dict[str, Any] = {"branches": local.branches, "batch": 8, "length": 64}
    start: Path | None = None
    if not options.from_scratch:
        begun = job(SMALL, local.text, **size, rounds=None, steps=before, seed=seeds)
        begun["training"] |= {"schedule": {"name": "constant"}, "optimizer": _adamw(3e-3)}
        loss_of(local, begun)
        start = local.model()
    losses: dict[str, list[float]] = {"rounds": [], "sync": []}
    sides: dict[str, dict[str, Any] | None] = {"rounds": {}, "sync": None}
    for seed, (side, rounds) in itertools.product(range(seeds), sides.items()):
        document = job(SMALL, local.text, **size, rounds=rounds, steps=steps, seed=seed)
        document["training"]["optimizer"] = _adamw(1e-3 if start is not None else 3e-3)
        if start is not None:
            document |= {"model": {"path": str(start)}, "tokenizer": {}}
        losses[side].append(loss_of(local, document))
    ratios = [ours / peer for ours, peer in zip(losses["rounds"], losses["sync"], strict=True)]
    print_figure(
        "validation_loss_vs_sync",
        ours=statistics.mean(losses["rounds"]),
        peer=statistics.mean(losses["sync"]),
        peer_name="AllReduce, same total batch",
        ratio=LOSS_GOAL / statistics.mean(ratios),
        unit="nats/token",
        loss_ratios=[round(one, 4) for one in ratios],
        goal_loss_ratio=LOSS_GOAL,
        losses={side: [round(one, 4) for one in found] for side, found in losses.items()},
        seeds=seeds,
        synchronous_steps_before=0 if start is None else before,
        steps=steps,
        branches=local.branches,
        tokens=steps * math.prod(size.values()),
        parameters=parameters_of(shapes_of(SMALL)),
    )


def _adamw(learning_rate: float) -> dict[str, Any]:
    return {"name": "adamw", "learning_rate": learning_rate, "weight_decay": 0.1}


# -- hosts with slow links ---------------------------------------------------------------------------------------------


class Commits:
    """Times of the committed steps of each branch of a job, read from the step logs while the job runs.

    Args:
        folder: folder of the job.
        branches: number of branches.
    """

    def __init__(self, folder: Path, branches: int) -> None:
        self.times: list[list[tuple[float, int]]] = [[] for _ in range(branches)]
        """For each branch, (time in seconds, last committed step) whenever the step grew."""
        self._files = [
            (folder / "branches" / f"{branch:04}" if branch else folder) / FILE for branch in range(branches)
        ]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def step(self, branch: int) -> int:
        """Return the last committed step of a branch; 0 before the first step."""
        return self.times[branch][-1][1] if self.times[branch] else 0

    def at(self, branch: int, step: int) -> float:
        """Return the time at which a branch had committed a step."""
        return next(at_s for at_s, committed in self.times[branch] if committed >= step)

    def pauses_s(self, branch: int, ends: Iterable[int]) -> list[float]:
        """Return the times from these steps to the following ones, each without the median time of a step."""
        step_s = statistics.median(
            after - before for (before, _), (after, _) in itertools.pairwise(self.times[branch])
        )
        return [self.at(branch, end + 1) - self.at(branch, end) - step_s for end in ends]

    def stall_s(self, branch: int, since_s: float) -> float:
        """Return the longest time between two commits of a branch of which the later one is after a time."""
        pairs = itertools.pairwise(at_s for at_s, _ in self.times[branch])
        return max((after - before for before, after in pairs if after >= since_s), default=math.inf)

    def _poll(self) -> None:
        bases: dict[int, sqlite3.Connection] = {}
        with ExitStack() as stack:
            while not self._is_over.wait(POLL_S):
                for branch, file in enumerate(self._files):
                    if branch not in bases and file.exists():
                        opened = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
                        bases[branch] = stack.enter_context(closing(opened))
                    with suppress(sqlite3.OperationalError):  # the tables are being made
                        if branch in bases:
                            ((step,),) = bases[branch].execute("SELECT committed FROM standing").fetchall()
                            if step > self.step(branch):
                                self.times[branch].append((time.monotonic(), step))


class Slow:
    """A server, and a machine for each branch, on hosts of their own; the machines' links are slow.

    Args:
        server: the server.
        machines: hosts of the machines, by machine name.
        stack: ends the agents of machines that join.
    """

    def __init__(self, server: RunningServer, machines: Mapping[str, Host], stack: ExitStack) -> None:
        self.server = server
        self.machines = machines
        self._stack = stack
        root = server.data_folder.with_name(f"{server.data_folder.name}-files")
        self.text = corpus(root, 400_000)

    @property
    def branches(self) -> int:
        """Number of branches."""
        return len(self.machines)

    def join_again(self, name: str) -> None:
        """Restart the agent of a machine with its stored key, as its service manager would."""
        host, folder = self.machines[name], self.server.data_folder
        joining = (
            "join",
            self.server.url,
            "--name",
            name,
            *_joining(host),
            "--cpu-threads",
            "1",
            "--device",
            "cpu",
            "--json",
        )
        stored = str(folder / "contributors")
        self._stack.enter_context(
            run_command(folder, *joining, inside=host.inside, SHARE_COMPUTE_DATA_FOLDER=stored)
        )

    @contextmanager
    def training(self, document: dict[str, Any]) -> Iterator[tuple[str, Commits]]:
        """Submit a job when all machines are ready; yield its id and commits, and cancel it in the end."""
        with self.server.client() as client:
            wait_for(
                lambda: all(ready(client, name) for name in self.machines), "all machines ready", DEADLINE_S
            )
            job_id = client.submit(document).id
            folder = job_folder(self.server.data_folder, "train", job_id)
            try:
                with Commits(folder, self.branches) as commits:
                    yield job_id, commits
            finally:
                with suppress(Conflict):  # the job has ended
                    client.cancel(job_id)
                wait_for(lambda: client.job(job_id).state.is_final, "the end of the job", DEADLINE_S)

    def wait_for_step(self, job_id: str, commits: Commits, step: int) -> None:
        """Wait until all branches have committed a step."""

        def has_committed() -> bool:
            with self.server.client() as client:
                found = client.job(job_id)
            if found.state.is_final and found.state is not JobState.succeeded:
                raise RuntimeError(f"{job_id} {found.state.value}: {found.reason}")
            time.sleep(0.5)
            return all(commits.step(branch) >= step for branch in range(self.branches))

        wait_for(has_committed, f"step {step} of all branches", DEADLINE_S)

    def machine_of(self, job_id: str, branch: int) -> str:
        """Return the name of the machine that trains a branch."""
        with self.server.client() as client:
            plan = client.job(job_id).plan
        assert plan is not None
        (found,) = (each for each in plan.branches if each.number == branch)
        (stage,) = found.stages
        return stage.members[0].name

    def wire_bytes(self) -> int:
        """Return the bytes that all machines have sent and received until now, with all headers."""
        return sum(host.call(_wire_bytes) for host in self.machines.values())


def _joining(host: Host) -> tuple[str, ...]:
    return ("--address", host.address, "--memory", "1500MiB", "--insecure")


def _wire_bytes() -> int:
    """Return the bytes that this thread's host has sent and received on its first interface."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(fields[0]) + int(fields[8])


@contextmanager
def slow_machines(branches: int) -> Iterator[Slow]:
    """Start the server, and let the machines join over slow links."""
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        host, *others = (network.add() for _ in range(1 + branches))
        # Paths of Ray's sockets are limited to 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sc-slow-", dir="/tmp")))
        listening = ("--host", host.address, "--insecure")
        server = stack.enter_context(run_server(folder / "data", *listening, inside=host.inside))
        named = {f"machine-{number}": machine for number, machine in enumerate(others)}
        for machine in others:
            stack.enter_context(machine.slow(DELAY_S, BYTES_PER_S))
        for name, machine in named.items():
            stack.enter_context(run_contributor(server, name, *_joining(machine), inside=machine.inside))
        yield Slow(server, named, stack)


@dataclass(frozen=True)
class Speed:
    """Speed of one job."""

    tokens_per_s: float
    """Sum over the branches."""
    wire_bytes_per_step: float
    """Bytes of one machine with all headers, heartbeats and requests."""
    pause_s: float
    """Mean time between the last step of a round and the first step of the next one; 0 without merges."""
    merge_s: float
    """Mean time in which the server computes and stores a merge; 0 without merges."""


@dataclass(frozen=True)
class Measured:
    """Sizes of the jobs whose speed is measured.

    A window of whole rounds contains one merge for each round, wherever it begins.
    """

    batch: int = 8
    length: int = 128
    every: int = 50
    rounds: int = 1
    first: int = 5
    """Last step of the warm-up."""
    overlap: int = 0
    """Steps that branches train on while a round is merged; less than `first`, so that windows contain the merge."""

    @property
    def last(self) -> int:
        """Last measured step."""
        return self.first + self.rounds * self.every

    @property
    def tokens(self) -> int:
        """Tokens of one step of a branch."""
        return self.batch * self.length

    def job(self, text: Path, branches: int, *, meets: bool) -> dict[str, Any]:
        """Return the job whose islands meet in rounds, or never meet before its end."""
        steps = self.last + 5
        every = self.every if meets else steps
        return job(
            LARGE,
            text,
            branches=branches,
            batch=self.batch,
            length=self.length,
            rounds={"every": every, "overlap": self.overlap},
            steps=steps,
        )


def speed_of(slow: Slow, size: Measured, *, meets: bool) -> Speed:
    """Train a job, and return the speed of its measured steps."""
    with slow.training(size.job(slow.text, slow.branches, meets=meets)) as (job_id, commits):
        slow.wait_for_step(job_id, commits, size.first)
        sent = slow.wire_bytes()
        slow.wait_for_step(job_id, commits, size.last)
        sent = slow.wire_bytes() - sent
        with slow.server.client() as client:
            merged = [
                event.data["merge_s"] for event in client.events(job_id).events if event.kind == "round"
            ]
    branches, steps = range(slow.branches), size.last - size.first
    taken_s = [commits.at(branch, size.last) - commits.at(branch, size.first) for branch in branches]
    ends = range(size.every, size.last, size.every) if meets else ()
    pauses = [pause_s for branch in branches for pause_s in commits.pauses_s(branch, ends)]
    return Speed(
        tokens_per_s=sum(steps * size.tokens / each for each in taken_s),
        wire_bytes_per_step=sent / slow.branches / steps,
        pause_s=statistics.mean(pauses) if pauses else 0.0,
        merge_s=statistics.mean(merged) if merged else 0.0,
    )


def measure_speeds(slow: Slow, options: argparse.Namespace) -> None:
    """Print the share of the speed that is left with merges, and the speed beside that of DDP; all sides take turns."""
    size = QUICK if options.quick else Measured(options.batch)
    sides: dict[str, Callable[[], Speed]] = {"together": lambda: speed_of(slow, size, meets=True)}
    if "utilisation" in options.only:
        overlapping = replace(size, overlap=OVERLAP)
        sides["overlapping"] = lambda: speed_of(slow, overlapping, meets=True)
        sides["apart"] = lambda: speed_of(slow, size, meets=False)
    speeds: dict[str, list[Speed]] = {side: [] for side in sides}
    peers: list[float] = []
    for turn in range(1 if options.quick else options.turns):
        for side, measure in sides.items():
            speeds[side].append(measure())
        if "powersgd" in options.only:
            peers.append(powersgd_speed(slow, size, _FIRST_PORT + turn, last=8 if options.quick else 18))
    if "utilisation" in options.only:
        print_utilisation("utilisation", speeds["together"], speeds["apart"], slow, size)
        print_utilisation(
            "utilisation_with_overlap", speeds["overlapping"], speeds["apart"], slow, overlapping
        )
    if not peers:
        return
    own = [speed.tokens_per_s for speed in speeds["together"]]
    print_speeds(
        "tokens_per_s_vs_ddp_powersgd",
        own,
        peers,
        peer_name="DDP with powerSGD_hook, rank 1, gloo",
        branches=slow.branches,
        tokens_per_step=size.tokens,
        turns=len(peers),
        **_LINKS,
    )


def print_utilisation(
    figure: str, speeds: Sequence[Speed], apart: Sequence[Speed], slow: Slow, size: Measured
) -> None:
    """Print the ratio of speeds with and without merges."""
    ratios = [ours.tokens_per_s / peer.tokens_per_s for ours, peer in zip(speeds, apart, strict=True)]
    print_figure(
        figure,
        ours=statistics.median(one.tokens_per_s for one in speeds),
        peer=statistics.median(one.tokens_per_s for one in apart),
        peer_name="the same islands, which never meet",
        ratio=statistics.median(ratios) / UTILISATION_GOAL,
        unit="tokens/s",
        utilisation=[round(one, 4) for one in ratios],
        goal_utilisation=UTILISATION_GOAL,
        pause_per_round_s=[round(one.pause_s, 2) for one in speeds],
        merge_on_server_s=[round(one.merge_s, 2) for one in speeds],
        wire_bytes_per_step=[round(one.wire_bytes_per_step) for one in speeds],
        peer_wire_bytes_per_step=[round(one.wire_bytes_per_step) for one in apart],
        branches=slow.branches,
        every=size.every,
        overlap=size.overlap,
        rounds=size.rounds,
        tokens_per_step=size.tokens,
        **_LINKS,
    )


@dataclass(frozen=True)
class Stall:
    """Longest times between two commits of a branch whose machine stays, in seconds."""

    seconds: float
    """After the kill, until the job failed or the observation ended."""
    undisturbed_s: float
    """In the rounds before."""
    failure: str
    """Reason why the job failed; empty if it goes on."""


def stall_of(slow: Slow, victim: int, observed_s: float) -> Stall:
    """Kill the machine of a branch; return the longest stall of another branch.

    Args:
        slow: the machines. The killed one joins again.
        victim: number of the branch whose machine is killed.
        observed_s: seconds after the kill in which commits are observed.
    """
    survivors = [branch for branch in range(slow.branches) if branch != victim]
    rounds = {"every": EVERY, "quorum": len(survivors), "grace_s": GRACE_S}
    document = job(SMALL, slow.text, branches=slow.branches, batch=8, length=64, rounds=rounds, steps=100_000)
    with slow.training(document) as (job_id, commits):
        slow.wait_for_step(job_id, commits, 2 * EVERY)
        begun_s = time.monotonic()
        middle = (commits.step(survivors[0]) // EVERY + 2) * EVERY + EVERY // 2
        wait_for(lambda: commits.step(survivors[0]) >= middle, "the middle of a round", DEADLINE_S)
        name = slow.machine_of(job_id, victim)
        undisturbed_s = max(commits.stall_s(branch, begun_s) for branch in survivors)
        killed_s = time.monotonic()
        slow.machines[name].kill(lambda _: True)
        time.sleep(observed_s)
        stall_s = max(commits.stall_s(branch, killed_s) for branch in survivors)
        with slow.server.client() as client:
            found = client.job(job_id)
            for event in client.events(job_id, limit=1000).events:
                if event.kind in {"note", "round", "reformed", "ended"}:
                    print(f"   {event.at:%H:%M:%S} {event.kind} {event.data}"[:2000], file=sys.stderr)
    slow.join_again(name)
    return Stall(stall_s, undisturbed_s, found.reason if found.state.is_final else "")


def measure_stall(slow: Slow, options: argparse.Namespace) -> None:
    """Print the stall of the other branches when the machine of one of the first two is killed."""
    victims = range(1) if options.quick else range(2)
    found = {f"branch {victim} killed": stall_of(slow, victim, OBSERVED_S) for victim in victims}
    stalls = {label: round(one.seconds, 2) for label, one in found.items()}
    failures = {label: one.failure[:300] for label, one in found.items() if one.failure}
    worst = max(stalls.values())
    print_figure(
        "island_loss_stall_s",
        ours=worst,
        peer=STALL_GOAL_S,
        peer_name="goal: grace_s + 1 s",
        ratio=0.0 if failures else STALL_GOAL_S / worst,
        unit="s",
        all_s=stalls,
        undisturbed_s={label: round(one.undisturbed_s, 2) for label, one in found.items()},
        failed_jobs=failures,
        grace_s=GRACE_S,
        branches=slow.branches,
        every=EVERY,
        **_LINKS,
    )


def powersgd_speed(slow: Slow, size: Measured, port: int, last: int) -> float:
    """Return the tokens/s of DDP with PowerSGD over the same links.

    Args:
        slow: the machines.
        size: size of the job.
        port: port at which the workers find each other.
        last: last measured step.
    """
    document = job(
        LARGE,
        slow.text,
        branches=slow.branches,
        batch=size.batch,
        length=size.length,
        rounds=None,
        steps=size.last,
    )
    with tempfile.TemporaryDirectory() as folder:
        # Prepared here, so that the workers do not wait for each other's tokenizer.
        prepare(parse_job(document), Path(folder) / "data")
        hosts = list(slow.machines.values())
        command = [sys.executable, str(Path(__file__).with_name("_rival_powersgd.py"))]
        facts = (slow.branches, hosts[0].address, port, _RIVAL_FIRST, last, folder)
        workers = [
            subprocess.Popen(
                [*host.inside, *command, *map(str, (rank, *facts))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(document))
                worker.stdin.close()
            for worker in workers:
                worker.wait(DEADLINE_S)
        finally:
            for worker in workers:
                worker.kill()
        assert workers[0].stdout is not None
        if any(worker.returncode for worker in workers):
            raise RuntimeError("a worker of DDP failed; its error is above")
        seconds = json.loads(workers[0].stdout.read())["seconds"]
    return float((last - _RIVAL_FIRST) * slow.branches * size.tokens / seconds)


_FIRST_PORT = 29500
_RIVAL_FIRST = 3
"""Last step of DDP's warm-up."""
_LINKS: dict[str, Any] = {"round_trip_ms": 1000 * 2 * DELAY_S, "mbit_per_s": 8 * BYTES_PER_S / 1e6}
QUICK = Measured(batch=1, length=64, every=10, rounds=1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: short jobs")
    parser.add_argument("--branches", type=int, help="number of islands; default: 4, or 2 with --quick")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the comparison of losses")
    parser.add_argument("--loss-steps", type=int, default=600, help="steps of the comparison of losses")
    parser.add_argument("--from-scratch", action="store_true", help="compare losses from the first step")
    parser.add_argument("--turns", type=int, default=1, help="turns of each side for the speeds")
    parser.add_argument(
        "--batch", type=int, default=8, help="samples in a step of each branch for the utilisation"
    )
    parser.add_argument("--only", nargs="*", choices=FIGURES, default=FIGURES, help="only these figures")
    options = parser.parse_args()
    branches = options.branches or (2 if options.quick else 4)
    if branches < 2:
        parser.error("--branches must be at least 2")
    if {"bytes", "loss"} & set(options.only):
        with local_machines(branches) as local:
            if "bytes" in options.only:
                measure_bytes(local, options)
            if "loss" in options.only:
                measure_loss(local, options)
    if not {"utilisation", "stall", "powersgd"} & set(options.only):
        return
    if (reason := why_not()) is not None:
        print(f"not measured: speeds and island_loss_stall_s: {reason}", file=sys.stderr)
        return
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # for the output of commands that end
        slow = stack.enter_context(slow_machines(branches))
        with redirect_stdout(sys.__stdout__):
            if {"utilisation", "powersgd"} & set(options.only):
                measure_speeds(slow, options)
            if "stall" in options.only:
                measure_stall(slow, options)


if __name__ == "__main__":
    main()
