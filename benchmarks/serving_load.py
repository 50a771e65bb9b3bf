"""Stream from one deployment with many clients for minutes: count errors and leaks, and compare two keys.

A server, a contributor and a tiny Llama are started as users start them. One key has three times as many clients as
the other; both should get equal shares. Each client sends its next request as soon as it has its answer, and after a
429 as soon as ``Retry-After`` allows. Memory should stay the same within 1% in a run of 64 clients and half an hour
(``--clients 64 --seconds 1800``); in shorter ones, caches still grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from _harness import print_figure
from _serving import make_model

from share_compute.data.tokenization import train_tokenizer
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute_actors.machine.run_folders import close_run_folder, open_run_folder
from share_compute_api.client.client import Client
from share_compute_api.demonstration.cluster import LocalCluster
from share_compute_api.demonstration.corpus import gather_corpus

PARTS = {"many": 3, "few": 1}
"""Share of each key in the clients."""
LENT = "600MiB"
"""Memory that the contributor lends. It is small, so that caches of ended sequences, which may fill all of it, have
done so before memory is measured."""
MIB = 2**20
VOCABULARY = 1024
NEW = 64
FAIR = 0.10
GROWTH = 0.01
WARM_SHARE = 1 / 3
"""Fraction of the time that is warm-up and does not count."""
SAMPLE_S = 2.0
READY_S = 120.0
_SHOWN = 20
"""Largest number of failed requests to print."""


@dataclass
class Measurements:
    """Answers that clients received, and measured memory."""

    tokens: Counter[str] = field(default_factory=Counter)
    """Number of tokens by key, from answers completed after the warm-up and before the end."""
    answers: Counter[str] = field(default_factory=Counter)
    """Number of answers by status or error."""
    failures: list[tuple[float, str]] = field(default_factory=list)
    """Requests without an HTTP answer, or with a broken one: (seconds since the load began, error and its cause)."""
    begun_s: float = field(default_factory=time.monotonic)
    first_token_s: list[float] = field(default_factory=list)
    memory_bytes: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    """Samples of the memory of the server, the contributor and what they run: (time, bytes by process)."""


def make_folder(folder: Path) -> None:
    """Write a tiny model with its tokenizer."""
    corpus = folder.parent / "corpus.txt"
    gather_corpus(corpus, 300_000)
    tokenizer = train_tokenizer(corpus.read_text().splitlines(), VOCABULARY)
    make_model(
        folder,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    tokenizer.save_pretrained(folder)


async def client(
    http: httpx.AsyncClient, name: str, key: str, measured: Measurements, warm_s: float, end_s: float
) -> None:
    """Stream answers one after the other until ``end_s``."""
    chance = random.Random()
    while time.monotonic() < end_s:
        requested_s, is_first = time.monotonic(), True
        body = {
            "model": "tiny",
            "prompt": [chance.randrange(VOCABULARY) for _ in range(chance.randrange(4, 48))],
            "max_tokens": NEW,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                if answer.status_code != httpx.codes.OK:
                    measured.answers[str(answer.status_code)] += 1
                    await asyncio.sleep(float(answer.headers.get("Retry-After", "1")))
                    continue
                tokens = 0
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if is_first:
                        measured.first_token_s.append(time.monotonic() - requested_s)
                        is_first = False
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        measured.answers[event["error"]["code"]] += 1
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                measured.answers["200" if tokens == NEW else "incomplete"] += 1
                # Answers after the end do not count: the key with more clients has more of them in flight.
                if warm_s < time.monotonic() < end_s:
                    measured.tokens[name] += tokens
        except httpx.HTTPError as failure:
            measured.answers[type(failure).__name__] += 1
            state = "before its answer" if is_first else "while it was streamed"
            what = (
                f"{first_cause(failure)}, {time.monotonic() - requested_s:.1f} s after the request, {state}"
            )
            measured.failures.append((round(time.monotonic() - measured.begun_s, 1), what))


def first_cause(failure: BaseException) -> str:
    """Return the type of an error, and the first error that caused it."""
    first = failure
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    return f"{type(failure).__name__} by {first!r}"


async def watch(measured: Measurements, end_s: float) -> None:
    """Sample the memory of all processes that were started here until ``end_s``."""
    me = psutil.Process()
    while time.monotonic() < end_s:
        await asyncio.sleep(SAMPLE_S)
        sizes: dict[str, int] = {}
        for process in me.children(recursive=True):
            with suppress(psutil.Error):
                sizes[f"{process.pid} {process.name()}"] = process.memory_full_info().uss
        measured.memory_bytes.append((time.monotonic(), sizes))


async def load(
    url: str, keys: dict[str, str], clients: dict[str, int], seconds: float
) -> tuple[Measurements, float]:
    """Run all clients, whose number is given by key; return the results, and the time from which they count."""
    measured = Measurements()
    warm_s, end_s = measured.begun_s + seconds * WARM_SHARE, measured.begun_s + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        tasks = [
            client(http, name, keys[name], measured, warm_s, end_s)
            for name, count in clients.items()
            for _ in range(count)
        ]
        await asyncio.gather(watch(measured, end_s), *tasks)
    return measured, warm_s


def growth(samples: list[dict[str, int]]) -> tuple[float, float, dict[str, float]]:
    """Return the median bytes of the first and the last third of samples, and how many MiB each process grew.

    Processes that grew by less than 1 MiB are left out.
    """
    third = max(len(samples) // 3, 1)
    first, last = samples[:third], samples[-third:]
    sums = [statistics.median(sum(each.values()) for each in part) for part in (first, last)]
    grown = {
        name: (median_of(last, name) - median_of(first, name)) / MIB
        for name in sorted({name for each in (*first, *last) for name in each})
    }
    return sums[0], sums[1], {name: round(size, 1) for name, size in grown.items() if abs(size) >= 1}


def median_of(samples: list[dict[str, int]], name: str) -> float:
    """Return the median bytes of a process; 0 where it was not running."""
    return statistics.median(each.get(name, 0) for each in samples)


def wait_until_ready(control: Client) -> None:
    """Wait until the deployment answers."""
    deadline_s = time.monotonic() + READY_S
    while (one := control.deployment("tiny")).state is not DeploymentState.ready:
        if one.state is DeploymentState.failed or time.monotonic() > deadline_s:
            raise RuntimeError(one.reason)
        time.sleep(0.2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: 20 seconds")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--clients", type=int, default=200, help="three quarters of them have the same key")
    options = parser.parse_args()
    seconds = 20.0 if options.quick else options.seconds
    clients = {name: options.clients * part // sum(PARTS.values()) for name, part in PARTS.items()}
    membership = open_run_folder(f"benchmark {os.getpid()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder / "tiny")
        cluster = LocalCluster(membership, folder / "server", [folder / "tiny"])
        try:
            with cluster.start() as control:
                cluster.join(control, "machine", memory=LENT)
                cluster.wait_until_ready(control, lambda _machines: None)
                keys = {owner: control.create_key(owner).key for owner in clients}
                control.deploy({"name": "tiny", "model": {"path": str(folder / "tiny")}})
                wait_until_ready(control)
                measured, warm_s = asyncio.run(load(cluster.url, keys, clients, seconds))
                (status,) = control.deployment_status("tiny").replicas
        finally:
            cluster.close()
            close_run_folder(membership)
    wrong = {what: count for what, count in measured.answers.items() if what not in ("200", "429")}
    few, many = measured.tokens["few"], measured.tokens["many"]
    print_figure(
        "fair_between_keys",
        ours=few,
        peer=many,
        peer_name="tokens of the key with three times as many clients",
        ratio=min(few, many) / max(few, many, 1) / (1 - FAIR),
        unit="tokens",
        answers=dict(measured.answers),
        errors_but_429=sum(wrong.values()),
        failures=measured.failures[:_SHOWN],
        tokens_per_s=round((few + many) / (seconds * (1 - WARM_SHARE)), 1),
        first_token_p50_s=round(statistics.median(measured.first_token_s), 3),
        clients=sum(clients.values()),
        seconds=seconds,
    )
    before, after, grown = growth([sizes for when, sizes in measured.memory_bytes if when > warm_s])
    print_figure(
        "memory_growth",
        ours=after / MIB,
        peer=before / MIB,
        peer_name="the same after warming up",
        ratio=(1 + GROWTH) * before / after,
        unit="MiB",
        growth=round(after / before - 1, 4),
        grown_mib=grown,
        clients=sum(clients.values()),
        seconds=seconds,
        kv_tokens=status.queue.kv_tokens,
        kv_tokens_kept=status.queue.kv_tokens_cached,
    )


if __name__ == "__main__":
    main()
