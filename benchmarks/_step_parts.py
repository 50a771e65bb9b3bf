"""Measure the CPU time of parts of an engine step in this process, without a model.

CPU times of one thread are measured, because other programs disturb them less than elapsed times.
"""

from __future__ import annotations

import pickle
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _harness import print_figure, timed

from share_compute.data.tokenization import train_tokenizer
from share_compute.inference.runtime.sampling import Sampler
from share_compute.inference.scheduler.engine_steps import (
    Chunk,
    EngineStep,
    Opening,
    SampledToken,
    StepResult,
)
from share_compute.inference.scheduler.events import Emitted, SequenceEvent, read_events, write_events
from share_compute.inference.scheduler.limits import SchedulerLimits
from share_compute.inference.scheduler.options import Generation, SamplingOptions
from share_compute_actors.inference.messages import pack_to_server, unpack_to_server
from share_compute_actors.inference.scheduler_service import SchedulerService
from share_compute_api.demonstration.corpus import gather_corpus
from share_compute_api.openai.writing import Writer
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

SEQUENCES = 32
"""Number of sequences in the measured engine step."""
SAMPLED_VOCABULARY = 128_256
SAMPLING_GOAL_MS = 1.0
_WINDOW = 1024
_PROMPT = 64
_TRAINED_VOCABULARY = 4096
_CORPUS_BYTES = 500_000
_STEP_TOKENS = 512
_GREEDY = SamplingOptions(temperature=0, seed=0, max_tokens=_WINDOW - _PROMPT)


# -- sampling --------------------------------------------------------------------------------------------------------


def peaked(source: torch.Generator) -> torch.Tensor:
    """Return logits ``[sequences, tokens]`` as of a language model: few tokens have most of the probability."""
    logits = torch.randn(SEQUENCES, SAMPLED_VOCABULARY, generator=source) * 2
    likely = torch.randint(SAMPLED_VOCABULARY, (SEQUENCES, 300), generator=source)
    return logits.scatter_(1, likely, torch.randn(SEQUENCES, 300, generator=source) * 3 + 8)


def spread(source: torch.Generator) -> torch.Tensor:
    """Return logits ``[sequences, tokens]`` where top_p keeps about a thousand tokens."""
    return torch.randn(SEQUENCES, SAMPLED_VOCABULARY, generator=source) * 3


def sampler_side(options: SamplingOptions, vocabulary: int) -> Callable[[torch.Tensor], object]:
    """Return a function that samples one token for each row of logits, as the last stage does."""
    sampler = Sampler(vocabulary, torch.device("cpu"))
    for sequence in range(SEQUENCES):
        seeded = options.model_copy(update={"seed": sequence})
        sampler.open(Opening(sequence, 64, seeded, (1, 2, 3), prompt_tokens=3))
    chunks = [Chunk(sequence, 2, 1, None, samples=True) for sequence in range(SEQUENCES)]
    return lambda logits: sampler.sample(logits, chunks)


def warpers_side(options: SamplingOptions) -> Callable[[torch.Tensor], object]:
    """Return a function that samples one token for each row of logits, as `generate` of transformers does."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(options.temperature), TopPLogitsWarper(options.top_p)]
    )
    ids = torch.zeros(SEQUENCES, 1, dtype=torch.int64)
    return lambda logits: torch.multinomial(warpers(ids, logits).softmax(-1), 1)


def measure_sampling(rounds: int) -> None:
    """Measure sampling on one thread, and print the milliseconds for each sequence."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = SamplingOptions(temperature=0.8, top_p=0.9, seed=0, max_tokens=64)
    sides = {"ours": sampler_side(options, SAMPLED_VOCABULARY), "transformers": warpers_side(options)}
    cases = {case.__name__: case(torch.Generator().manual_seed(1)) for case in (peaked, spread)}
    taken: dict[tuple[str, str], list[float]] = {}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for case, logits in cases.items():
                for name, side in sides.items():
                    _, taken_ms = timed(partial(side, logits))
                    taken.setdefault((name, case), []).append(taken_ms / SEQUENCES)
    torch.set_num_threads(threads)
    medians = {key: statistics.median(times[1:]) for key, times in taken.items()}  # the first is warm-up
    own = medians["ours", "peaked"]
    print_figure(
        "sampling_ms_per_sequence",
        ours=own,
        peer=medians["transformers", "peaked"],
        peer_name="transformers: warpers and multinomial, 1 thread",
        ratio=SAMPLING_GOAL_MS / own,
        unit="ms",
        goal=SAMPLING_GOAL_MS,
        speed_ratio=round(medians["transformers", "peaked"] / own, 3),
        sequences=SEQUENCES,
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
        source = np.random.Generator(np.random.Philox(key=1, counter=position << 64))
        times.append(timed(partial(source.standard_exponential, SAMPLED_VOCABULARY))[1])
    return statistics.median(times)


# -- parts of one engine step ----------------------------------------------------------------------------------------


def measure_parts(vocabulary: int, repeats: int) -> dict[str, float]:
    """Return the CPU milliseconds of parts of an engine step that decodes one token of each of `SEQUENCES`.

    Sampling takes the most probable of ``vocabulary`` tokens. Transport is the work of encoding and decoding the step,
    its result and its events, without the time that they are under way.
    """
    scheduling, transport = measure_server(vocabulary, repeats)
    return {
        "sampling": measure_greedy(vocabulary, repeats),
        "scheduling": scheduling,
        "transport": transport,
        "detokenizing": measure_detokenizing(repeats),
    }


def measure_greedy(vocabulary: int, repeats: int) -> float:
    """Return the CPU milliseconds of finding the most probable token of each sequence."""
    sample = partial(
        sampler_side(_GREEDY, vocabulary),
        torch.randn(SEQUENCES, vocabulary, generator=torch.Generator().manual_seed(1)),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        times = [timed(sample)[1] for _ in range(repeats + 1)]
    torch.set_num_threads(threads)
    return statistics.median(times[1:])


def measure_server(vocabulary: int, repeats: int) -> tuple[float, float]:
    """Return the CPU milliseconds of scheduling and of the messages of a step."""
    chance = random.Random(1)
    limits = SchedulerLimits(
        window_tokens=_WINDOW,
        kv_tokens=SEQUENCES * _WINDOW,
        max_sequences=SEQUENCES,
        step_tokens=_STEP_TOKENS,
        stages=1,
        max_queued=SEQUENCES,
    )
    service = SchedulerService(limits, lambda: None)
    service.submit(
        [
            Generation(
                sequence=sequence,
                owner="key",
                prompt=tuple(chance.randrange(vocabulary) for _ in range(_PROMPT)),
                options=_GREEDY,
            )
            for sequence in range(SEQUENCES)
        ]
    )
    received = 0
    scheduling: list[float] = []
    transport: list[float] = []
    while len(scheduling) < repeats:
        steps, building_ms = timed(service.next_steps)
        for step in steps:
            sampled = tuple(
                SampledToken(chunk.sequence, chunk.start + chunk.count, chance.randrange(vocabulary))
                for chunk in step.chunks
                if chunk.samples
            )
            result = StepResult(step.id, step.epoch, sampled)
            _, completing_ms = timed(partial(service.completed, result))
            events = service.pull(received, 0.0)
            received += len(events)
            if all(chunk.count == 1 for chunk in step.chunks):
                scheduling.append(building_ms / len(steps) + completing_ms)
                transport.append(timed(partial(encode_and_decode, step, result, events))[1])
    return statistics.median(scheduling), statistics.median(transport)


def encode_and_decode(step: EngineStep, result: StepResult, events: Sequence[SequenceEvent]) -> None:
    """Encode and decode the messages of a step: from server to member, from member to server, and to the client."""
    from ray import cloudpickle

    pickle.loads(cloudpickle.dumps([step]))
    unpack_to_server(pack_to_server(result), "member")
    read_events(write_events(events))


def measure_detokenizing(repeats: int) -> float:
    """Return the CPU milliseconds of turning one token of each sequence into text."""
    with tempfile.TemporaryDirectory() as name:
        corpus, folder = Path(name) / "corpus.txt", Path(name) / "tokenizer"
        gather_corpus(corpus, _CORPUS_BYTES)
        text = corpus.read_text()
        tokenizer = train_tokenizer(text.splitlines(), _TRAINED_VOCABULARY)
        tokenizer.save_pretrained(folder)
        vocabulary = ServedTokenizer(folder).vocabulary
    ids: list[int] = tokenizer.encode(text)
    starts = range(_PROMPT, len(ids) - repeats, (len(ids) - repeats - _PROMPT) // SEQUENCES)[:SEQUENCES]
    writers = [Writer(vocabulary, ids[start - _PROMPT : start]) for start in starts]

    def write(index: int) -> None:
        for sequence, (writer, start) in enumerate(zip(writers, starts, strict=True)):
            writer.read(Emitted(sequence, index, ids[start + index], None, ()))

    return statistics.median(timed(partial(write, index))[1] for index in range(repeats))
