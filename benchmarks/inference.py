"""Compare prefill and decode of a 67 M Llama: on one machine, in two stages, in int8, and with other programs.

All sides are resident in one run and take turns, in another order in each round. The peers are `generate` of
transformers and, if their interpreters are given, vLLM and llama.cpp. Machines are raylets of this machine; each has
one thread, except for one that has two. No text ends early, and every prompt is new, so that nothing is cached. Times
are of whole calls as a client sees them. CPU times are those of all processes of a side. Each comparison counts the
texts that differ between its two sides; weights in int8 may give other tokens.

Before all this, one process measures sampling and other parts of an engine step; see `_step_parts`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil
from _attempts import Machines
from _harness import print_figure, start_cluster
from _rival_loop import Settings
from _rivals import RivalProgram
from _serving import Served, make_model, with_threads
from _step_parts import SEQUENCES, measure_parts, measure_sampling
from pydantic import TypeAdapter

from share_compute.program import command_of
from share_compute.topology import Device, Topology

VOCABULARY = 32_000
WINDOW = 1024
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": WINDOW,
    "tie_word_embeddings": False,
}
MEMORY_BYTES = 5 * 2**29
"""Memory that each machine of share-compute lends. It holds the model and the caches of 64 sequences; caches of ended
sequences fill the rest, and all sides together must fit into this machine."""


class Work(NamedTuple):
    """One call: a number of concurrent prompts, their length, and the number of new tokens for each."""

    name: str
    streams: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """Return the tokens that count for its speed: the generated ones, or the prompt's if only one is generated."""
        return self.streams * (self.new if self.new > 1 else self.prompt)

    def prompts(self, chance: random.Random) -> list[list[int]]:
        """Return new random prompts."""
        return [[chance.randrange(VOCABULARY) for _ in range(self.prompt)] for _ in range(self.streams)]


PREFILL = Work("prefill_512", 1, 512, 1)
DECODE = Work("decode_1", 1, 64, 128)
STEP = Work("streams_32", SEQUENCES, 64, 32)
"""Work whose engine steps are compared with their parts."""
QUICK = (PREFILL, DECODE, Work("streams_8", 8, 64, 64), STEP)
WORKS = (
    *QUICK,
    Work("streams_64", 64, 64, 32),
    Work("decode_1_prompt_512", 1, 512, 64),
    Work("streams_8_prompt_512", 8, 512, 64),
)
LONG = (Work("streams_32_prompt_512", 32, 512, 32), Work("streams_64_prompt_512", 64, 512, 32))
"""Works that take about a minute for each side."""
THREADS = {1: "1 thread", 2: "2 threads"}
SPLIT = "split, 2 stages of 1 thread"
INTEGERS = "solo in int8, 1 thread"
RPC = "llama.cpp RPC, 2 servers of 1 thread"
BATCH_GOAL = 1.15
"""Least speed with several streams, compared with transformers with as many threads."""
SPLIT_GOALS = {"1 thread": 1.6, "2 threads": 1.1}
"""Least speed of eight streams in two stages, compared with transformers."""


@dataclass(frozen=True)
class Side:
    """A program that generates tokens."""

    generate: Callable[[list[list[int]], int], tuple[float, list[list[int]]]]
    """Function that generates a number of tokens after each prompt; it returns the seconds and the tokens."""
    pids: Callable[[], Iterable[int]]
    """Function that returns the ids of its processes, without their children."""

    @classmethod
    def ours(cls, served: Served) -> Side:
        """Return a side that calls a deployment of share-compute."""

        def generate(prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
            streams = served.follow(served.submit(prompts, new))
            return streams.seconds, streams.texts

        return cls(generate, served.pids)

    @classmethod
    def theirs(cls, rival: RivalProgram) -> Side:
        """Return a side that calls another program."""
        return cls(rival.generate, lambda: [rival.pid])

    def run(self, work: Work, prompts: list[list[int]]) -> Turn:
        """Do a work, and measure it."""
        pids = list(self.pids())
        before_s = cpu_seconds(pids)
        seconds, texts = self.generate(prompts, work.new)
        return Turn(seconds, cpu_seconds(pids) - before_s, texts)


@dataclass(frozen=True)
class Turn:
    """One side's result of a work in one round."""

    seconds: float
    cpu_seconds: float
    texts: list[list[int]]


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds that these processes and their descendants have used so far."""
    roots = [psutil.Process(pid) for pid in pids]
    times = [each.cpu_times() for root in roots for each in (root, *root.children(recursive=True))]
    return sum(used.user + used.system for used in times)


def probed() -> Device:
    """Return the device as a contributor with one thread would measure it on this machine."""
    command = command_of("share_compute_actors.machine.probe", "--json", "--device", "cpu")
    probe = subprocess.run([*command, "--memory-bytes", str(MEMORY_BYTES)], check=True, capture_output=True)
    (device,) = TypeAdapter(tuple[Device, ...]).validate_json(probe.stdout)
    return device


@contextmanager
def start_deployments(folder: Path, machines: Machines, works: Sequence[Work]) -> Iterator[dict[str, Served]]:
    """Start share-compute's sides on five machines; yield them by name when they are ready."""
    one, two, three, *pair = machines.topology(5).contributors
    wanted = {
        "max_concurrent": max(work.streams for work in works),
        "prompt_tokens": max(work.prompt for work in works),
        "new_tokens": max(work.new for work in works),
    }
    stages = {"objective": "throughput", "parallelism": {"stages": 2}}
    deployments = {
        "solo, 1 thread": Served(folder, Topology((one,)), WINDOW, **wanted),
        "solo, 2 threads": Served(folder, with_threads(Topology((two,)), 2), WINDOW, **wanted),
        INTEGERS: Served(folder, Topology((three,)), WINDOW, dtype="int8", **wanted),
        SPLIT: Served(folder, Topology(tuple(pair)), WINDOW, **stages, **wanted),
    }
    with ExitStack() as stack:
        for served in deployments.values():
            stack.enter_context(closing(served))
        for name, served in deployments.items():
            served.wait_for(2 if name == SPLIT else 1)
        yield deployments


@contextmanager
def start_rivals(
    folder: Path, works: Sequence[Work], vllm: str | None, llama_cpp: str | None
) -> Iterator[dict[str, RivalProgram]]:
    """Start the other programs, each with one and with two threads; yield them by name when they are ready.

    Args:
        folder: folder of the model.
        works: works that they will do.
        vllm: interpreter of an environment with vLLM; None leaves vLLM out.
        llama_cpp: interpreter of an environment with llama.cpp; None leaves llama.cpp out.
    """
    settings = Settings(
        str(folder),
        threads=1,
        window=WINDOW,
        sequences=max(work.streams for work in works),
        tokens=max(work.streams * (work.prompt + work.new) for work in works),
    )
    programs = {
        "transformers": (sys.executable, "_rival_transformers.py"),
        "vLLM": (vllm, "_rival_vllm.py"),
        "llama.cpp": (llama_cpp, "_rival_llama_cpp.py"),
    }
    with ExitStack() as stack:

        def start(python: str, script: str, settings: Settings) -> RivalProgram:
            log = folder.parent / f"{script}-{settings.threads}-{settings.servers}.log"
            return stack.enter_context(closing(RivalProgram(python, script, settings, log)))

        rivals: dict[str, RivalProgram] = {}
        for program, (python, script) in programs.items():
            if python is None:
                print(f"{program} is left out: no interpreter is given", file=sys.stderr)
                continue
            for threads, label in THREADS.items():
                rivals[f"{program}, {label}"] = start(python, script, replace(settings, threads=threads))
            if program == "llama.cpp":
                rivals[RPC] = start(python, script, replace(settings, servers=2))
        yield rivals


@dataclass(frozen=True)
class Measured:
    """Results of all rounds; the first round is warm-up."""

    turns: dict[tuple[str, str], list[Turn]]
    """Results by names of side and work."""

    def seconds(self, side: str, work: Work) -> list[float]:
        """Return the seconds of each measured round."""
        return [turn.seconds for turn in self.turns[side, work.name][1:]]

    def tokens_per_cpu_second(self, side: str, work: Work) -> float:
        """Return the median over the measured rounds."""
        turns = self.turns[side, work.name][1:]
        return round(statistics.median(work.tokens / turn.cpu_seconds for turn in turns), 1)

    def compare(self, figure: str, one: str, other: str, work: Work, goal: float) -> None:
        """Print the ratio of the speeds of two sides, relative to the goal; print nothing without the other side."""
        if (other, work.name) not in self.turns:
            return
        first, second = self.seconds(one, work), self.seconds(other, work)
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        pairs = zip(self.turns[one, work.name], self.turns[other, work.name], strict=True)
        differing = [a != b for ours, theirs in pairs for a, b in zip(ours.texts, theirs.texts, strict=True)]
        print_figure(
            figure,
            ours=work.tokens / statistics.median(first),
            peer=work.tokens / statistics.median(second),
            peer_name=other,
            ratio=statistics.median(ratios) / goal,
            unit="tokens/s",
            side=one,
            work=work.name,
            goal=goal,
            speed_ratio=round(statistics.median(ratios), 3),
            speed_ratios=[round(min(ratios), 3), round(max(ratios), 3)],
            tokens_per_cpu_second={
                "ours": self.tokens_per_cpu_second(one, work),
                "peer": self.tokens_per_cpu_second(other, work),
            },
            rounds=len(ratios),
            texts=len(differing),
            texts_that_differ=sum(differing),
        )


def measure(sides: dict[str, Side], works: Sequence[Work], rounds: int, chance: random.Random) -> Measured:
    """Let all sides do the same works in turn, in another order in each round, after a round of warm-up."""
    turns: dict[tuple[str, str], list[Turn]] = {}
    for _ in range(rounds + 1):
        for work in works:
            prompts = work.prompts(chance)
            for name in chance.sample(sorted(sides), len(sides)):
                turns.setdefault((name, work.name), []).append(sides[name].run(work, prompts))
    return Measured(turns)


def print_comparisons(found: Measured, works: Sequence[Work]) -> None:
    """Print all comparisons of speeds."""
    for work in works:
        for threads in THREADS.values():
            solo, goal = f"solo, {threads}", 1.0 if work.streams == 1 else BATCH_GOAL
            found.compare("solo_vs_transformers", solo, f"transformers, {threads}", work, goal)
            found.compare("solo_vs_vllm", solo, f"vLLM, {threads}", work, 1.0)
            found.compare("solo_vs_llama_cpp", solo, f"llama.cpp, {threads}", work, 1.0)
            if work.streams == 8:
                figure = f"streams_8_split_vs_transformers_{threads.replace(' ', '_')}"
                found.compare(figure, SPLIT, f"transformers, {threads}", work, SPLIT_GOALS[threads])
        if work.streams == 1 and work.new > 1:
            found.compare("decode_1_split_vs_solo", SPLIT, "solo, 1 thread", work, 0.95)
        found.compare("split_vs_llama_cpp_rpc", SPLIT, RPC, work, 1.0)
        found.compare("int8_vs_float32", INTEGERS, "solo, 1 thread", work, 1.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: one round of few works")
    parser.add_argument(
        "--full", action="store_true", help="add prompts of 512 tokens with 32 and 64 streams"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of all sides")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM's CPU build"
    )
    parser.add_argument(
        "--llama-cpp", metavar="PYTHON", help="interpreter of one with llama-cpp-python and gguf"
    )
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    works = QUICK if options.quick else (*WORKS, *LONG) if options.full else WORKS
    measure_sampling(4 * rounds)
    parts = measure_parts(VOCABULARY, 100 * rounds)
    with tempfile.TemporaryDirectory() as name, start_cluster() as cluster:
        folder = Path(name) / "model"
        parameters = make_model(folder, **CONFIG)
        machines = Machines(cluster, probed())
        with (
            start_deployments(folder, machines, works) as deployments,
            start_rivals(folder, works, options.vllm, options.llama_cpp) as rivals,
        ):
            stages = deployments[SPLIT].status().stages
            sides = {name: Side.ours(served) for name, served in deployments.items()}
            sides |= {name: Side.theirs(rival) for name, rival in rivals.items()}
            found = measure(sides, works, rounds, random.Random(options.seed))
    print_comparisons(found, works)
    pairs = zip(found.seconds("solo, 1 thread", DECODE), found.seconds(SPLIT, DECODE), strict=True)
    hops = [1000 * (cut - whole) / DECODE.new for whole, cut in pairs]
    print_figure(
        "hop_ms",
        ours=statistics.median(hops),
        peer=1.0,
        peer_name="goal: most milliseconds that a token takes longer for one boundary between stages",
        ratio=1.0 / max(statistics.median(hops), 1e-3),
        unit="ms",
        hops=[round(hop, 3) for hop in hops],
        parameters=parameters,
        layers=[stage.stop - stage.start for stage in stages],
    )
    step_ms = 1000 * statistics.median(found.seconds("solo, 1 thread", STEP)) / STEP.new
    for part, part_ms in parts.items():
        print_figure(
            f"{part}_ms_per_step",
            ours=part_ms,
            peer=step_ms,
            peer_name=f"time of {STEP.name} per token of a stream, 1 thread",
            ratio=step_ms / part_ms,
            unit="ms",
            sequences=SEQUENCES,
        )


if __name__ == "__main__":
    main()
