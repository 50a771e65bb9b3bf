"""Compare prefill and decode of a 67 M Llama in float32: on one machine, in two stages, and with transformers.

All sides are resident in one run and take turns. The peer is `generate` of transformers. Machines are raylets of this
machine; each has one thread, except for one that has two. No text ends early, and every prompt is new, so that nothing
is cached. Times are of whole calls as a client sees them. All sides must give the same tokens. Weights in int8 take
turns with float32 afterwards; their tokens may differ.

Before all this, one process measures the sampling of one engine step: 32 sequences, 128k tokens, temperature and top_p.
Its times are CPU times of one thread, so other programs disturb them less. The peer is the code of transformers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.multiprocessing as mp
from _attempts import Machines
from _harness import print_figure, start_cluster
from _serving import Prompt, Served, make_model, with_threads
from pydantic import TypeAdapter

from share_compute.inference.runtime.sampling import Sampler
from share_compute.inference.scheduler.engine_steps import Chunk, Opening
from share_compute.inference.scheduler.options import SamplingOptions
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
DECODE = Work("decode_1", 1, 16, 128)
STREAMS = Work("streams_8", 8, 128, 128)
WORKS = (PREFILL, DECODE, STREAMS)
SAMPLED = 32
"""Number of sequences whose sampling is measured."""
SAMPLED_VOCABULARY = 128_256
Side = Callable[[list[list[int]], int], tuple[float, list[list[int]]]]
"""Function that generates a number of tokens after each prompt; it returns the seconds and the tokens."""


def ours(served: Served) -> Side:
    """Return a side that calls a deployment of share-compute."""

    def run(prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        streams = served.follow(served.submit(prompts, count))
        return streams.seconds, streams.texts

    return run


def probed() -> Device:
    """Return the device as a contributor with one thread would measure it on this machine."""
    command = [sys.executable, "-m", "share_compute_actors.machine.probe", "--json", "--device", "cpu"]
    probe = subprocess.run([*command, "--memory-bytes", str(4 * 2**30)], check=True, capture_output=True)
    (device,) = TypeAdapter(tuple[Device, ...]).validate_json(probe.stdout)
    return device


def worker(folder: str, end: Connection) -> None:
    """Run the process of transformers."""
    import time

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end.send("ready")
    while (call := end.recv()) is not None:
        prompts, count, threads = call
        torch.set_num_threads(threads)
        tokens = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            texts = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        end.send((time.perf_counter() - start, texts[:, tokens.shape[1] :].tolist()))


class Transformers:
    """`generate` of transformers in a process of its own."""

    def __init__(self, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._end, there = context.Pipe()
        self._process = context.Process(target=worker, args=(str(folder), there))
        self._process.start()
        self._end.recv()

    def side(self, threads: int) -> Side:
        """Return a side that calls it with this number of threads."""

        def run(prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
            self._end.send((prompts, count, threads))
            answer: tuple[float, list[list[int]]] = self._end.recv()
            return answer

        return run

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._end.send(None)
        self._process.join()


@dataclass(frozen=True)
class Measured:
    """Measured seconds of each side in each round, by work."""

    seconds: dict[str, dict[str, list[float]]]
    differing: int
    """Number of texts that differed between the sides."""

    def speeds(self, side: str, work: Work) -> list[float]:
        """Return the tokens/s of each round."""
        return [work.tokens / seconds for seconds in self.seconds[side][work.name]]

    def compare(self, figure: str, one: str, other: str, work: Work, goal: float) -> None:
        """Print the ratio of the speeds of two sides."""
        first, second = self.speeds(one, work), self.speeds(other, work)
        ratios = [a / b for a, b in zip(first, second, strict=True)]
        print_figure(
            figure,
            ours=statistics.median(first),
            peer=statistics.median(second),
            peer_name=other,
            ratio=statistics.median(ratios),
            unit="tokens/s",
            side=one,
            work=work.name,
            goal=goal,
            ratios=[round(min(ratios), 3), round(max(ratios), 3)],
            rounds=len(ratios),
            texts_that_differ=self.differing,
        )


def measure(sides: dict[str, Side], rounds: int, chance: random.Random) -> Measured:
    """Let all sides do the same work in turn, in another order in each round; the first round is warm-up."""
    seconds: dict[str, dict[str, list[float]]] = {side: {work.name: [] for work in WORKS} for side in sides}
    differing = 0
    for number in range(rounds + 1):
        for work in WORKS:
            prompts = work.prompts(chance)
            texts: list[Sequence[Prompt]] = []
            for name in chance.sample(sorted(sides), len(sides)):
                taken_s, probe = sides[name](prompts, work.new)
                texts.append(probe)
                if number:
                    seconds[name][work.name].append(taken_s)
            differing += sum(any(one != each[0] for one in each) for each in zip(*texts, strict=True))
    return Measured(seconds, differing)


def peaked(source: torch.Generator) -> torch.Tensor:
    """Return logits ``[sequences, tokens]`` as of a language model: few tokens have most of the probability."""
    logits = torch.randn(SAMPLED, SAMPLED_VOCABULARY, generator=source) * 2
    likely = torch.randint(SAMPLED_VOCABULARY, (SAMPLED, 300), generator=source)
    return logits.scatter_(1, likely, torch.randn(SAMPLED, 300, generator=source) * 3 + 8)


def spread(source: torch.Generator) -> torch.Tensor:
    """Return logits ``[sequences, tokens]`` where top_p keeps about a thousand tokens."""
    return torch.randn(SAMPLED, SAMPLED_VOCABULARY, generator=source) * 3


def sampler_side(options: SamplingOptions) -> Callable[[torch.Tensor], object]:
    """Return a function that samples one token for each row of logits, as the last stage does."""
    sampler = Sampler(SAMPLED_VOCABULARY, torch.device("cpu"))
    for sequence in range(SAMPLED):
        seeded = options.model_copy(update={"seed": sequence})
        sampler.open(Opening(sequence, 64, seeded, (1, 2, 3), prompt_tokens=3))
    chunks = [Chunk(sequence, 2, 1, None, samples=True) for sequence in range(SAMPLED)]
    return lambda logits: sampler.sample(logits, chunks)


def warpers_side(options: SamplingOptions) -> Callable[[torch.Tensor], object]:
    """Return a function that samples one token for each row of logits, as `generate` of transformers does."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(options.temperature), TopPLogitsWarper(options.top_p)]
    )
    ids = torch.zeros(SAMPLED, 1, dtype=torch.int64)
    return lambda logits: torch.multinomial(warpers(ids, logits).softmax(-1), 1)


def measure_sampling(rounds: int) -> None:
    """Measure sampling on one thread, and print the milliseconds for each sequence."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = SamplingOptions(temperature=0.8, top_p=0.9, seed=0, max_tokens=64)
    sides = {"ours": sampler_side(options), "transformers": warpers_side(options)}
    cases = {case.__name__: case(torch.Generator().manual_seed(1)) for case in (peaked, spread)}
    taken: dict[tuple[str, str], list[float]] = {}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for case, logits in cases.items():
                for name, side in sides.items():
                    start_s = time.thread_time()
                    side(logits)
                    taken.setdefault((name, case), []).append(1000 * (time.thread_time() - start_s) / SAMPLED)
    torch.set_num_threads(threads)
    medians = {key: statistics.median(times[1:]) for key, times in taken.items()}  # the first is warm-up
    own = medians["ours", "peaked"]
    print_figure(
        "sampling_ms_per_sequence",
        ours=own,
        peer=medians["transformers", "peaked"],
        peer_name="transformers: warpers and multinomial, 1 thread",
        ratio=medians["transformers", "peaked"] / own,
        unit="ms",
        goal=1.0,
        sequences=SAMPLED,
        vocabulary=SAMPLED_VOCABULARY,
        temperature=options.temperature,
        top_p=options.top_p,
        random_numbers_ms=round(random_numbers_ms(rounds), 3),
        spread={name: round(medians[name, "spread"], 3) for name in sides},
        rounds=rounds,
    )


def random_numbers_ms(rounds: int) -> float:
    """Return the milliseconds that one random number for each token takes, which most of a draw consists of."""
    times = []
    for position in range(4 * rounds):
        start_s = time.thread_time()
        np.random.Generator(np.random.Philox(key=1, counter=position << 64)).standard_exponential(
            SAMPLED_VOCABULARY
        )
        times.append(1000 * (time.thread_time() - start_s))
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: one round")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of all sides")
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    measure_sampling(4 * rounds)
    rival = "transformers, {} thread"
    with tempfile.TemporaryDirectory() as name, start_cluster() as cluster:
        folder = Path(name) / "model"
        parameters = make_model(folder, **CONFIG)
        one, two, three, *pair = Machines(cluster, probed()).topology(5).contributors
        wanted = {
            "max_concurrent": STREAMS.streams,
            "prompt_tokens": PREFILL.prompt,
            "new_tokens": STREAMS.new,
        }
        solo = Served(folder, Topology((one,)), WINDOW, **wanted)
        solo_2 = Served(folder, with_threads(Topology((two,)), 2), WINDOW, **wanted)
        integers = Served(folder, Topology((three,)), WINDOW, dtype="int8", **wanted)
        split = Served(
            folder,
            Topology(tuple(pair)),
            WINDOW,
            objective="throughput",
            parallelism={"stages": 2},
            **wanted,
        )
        peer = Transformers(folder)
        try:
            solo.wait_for(1)
            solo_2.wait_for(1)
            integers.wait_for(1)
            stages = split.wait_for(2).stages
            sides = {
                "solo, 1 thread": ours(solo),
                "solo, 2 threads": ours(solo_2),
                "split, 2 stages of 1 thread": ours(split),
                rival.format(1): peer.side(1),
                rival.format(2) + "s": peer.side(2),
            }
            found = measure(sides, rounds, random.Random(options.seed))
            floats_name, integers_name = "solo, 1 thread", "solo in int8, 1 thread"
            both = {floats_name: ours(solo), integers_name: ours(integers)}
            narrow = measure(both, rounds, random.Random(options.seed))
        finally:
            peer.close()
            for served in (solo, solo_2, integers, split):
                served.close()
    split_name, alone, first, second = list(sides)[2], *list(sides)[:1], *list(sides)[3:]
    found.compare("decode_1_split_vs_solo", split_name, alone, DECODE, 0.9)
    found.compare("streams_8_split_vs_transformers_1_thread", split_name, first, STREAMS, 1.6)
    found.compare("streams_8_split_vs_transformers_2_threads", split_name, second, STREAMS, 1.1)
    for work in WORKS:
        found.compare("solo_vs_transformers", alone, first, work, 1.0)
        found.compare("solo_vs_transformers", list(sides)[1], second, work, 1.0)
    for work in WORKS:
        narrow.compare("int8_vs_float32", integers_name, floats_name, work, 1.0)
    lone, cut = found.seconds[alone][DECODE.name], found.seconds[split_name][DECODE.name]
    hops = [1000 * (b - a) / DECODE.new for a, b in zip(lone, cut, strict=True)]
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


if __name__ == "__main__":
    main()
