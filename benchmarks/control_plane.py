"""Measure the control plane: REST latency and memory with 200 clients, heartbeats, and isolated tokenization.

A real uvicorn server runs without a Ray cluster in a process of its own. Clients on the same machine send the requests
of browsers, programs and contributors, each about every eight seconds: health, lists of jobs, single jobs, submissions
and heartbeats. Some keep an event stream open. With ``--baseline PATH`` the server of another checkout is measured in
the same run, in turn with this one. The goal is a 99th percentile of at most 1.1 times its own. Without it, figures
have no peer. Clients use only HTTP, so the checkouts may differ in everything except these routes.

The server's share of a processor is printed, too. Near 1, latencies are those of a queue, and their tails mean
nothing; ``--pause 4`` comes close to that on a slow machine.

Heartbeats per second are those of 1,000 machines that all train one job; each machine sends one every two seconds, so
the server needs 500. Sixteen connections send them as fast as the server answers. The processor time of the server for
one heartbeat depends less on other load.

Another figure is the extra time for a chat of 500 tokens, from the request's messages to its token ids, that it costs
to render the template and tokenize the text in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from _harness import print_figure

from share_compute_actors.machine.processes import tied

OURS = Path(__file__).resolve().parents[1]
SERVER = Path(__file__).with_name("_control_plane_server.py")
GOAL = 1.1
GOAL_TOKENIZING_MS = 1.0
WARM_UP_S = 3.0
JOB = {
    "name": "digits",
    "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
    "data": {"dataset": "digits"},
    "training": {"steps": 3},
}
MIX = {"health": 10, "list": 35, "get": 30, "submit": 5, "heartbeat": 20}
"""Proportions of the requests, in percent."""
FIRST_JOBS = 50
NEEDED_PER_S = 500.0
"""Heartbeats per second of 1,000 machines."""
CONNECTIONS = 16
MIB = 2**20
Measured = TypeVar("Measured")


@dataclass
class Round:
    """Measurements of one server."""

    latencies_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    memory_bytes: int = 0
    cpu_share: float = 0.0
    """Fraction of one processor that the server used during the measurement."""

    def percentile_ms(self, percent: int) -> float:
        """Return a percentile of the latencies."""
        return statistics.quantiles(self.latencies_s, n=100)[percent - 1] * 1000


class Server:
    """The server of one checkout."""

    def __init__(self, checkout: Path, folder: Path, contributors: int, *more: str) -> None:
        path = os.pathsep.join(str(checkout / part) for part in ("platform", "actors", "api"))
        self._process = subprocess.Popen(
            tied([sys.executable, str(SERVER), str(folder), str(contributors), *more]),
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder.parent,
        )
        assert self._process.stdout is not None
        facts = json.loads(self._process.stdout.readline())
        self.port: int = facts["port"]
        self.url = f"http://127.0.0.1:{self.port}"
        self.api_key: str = facts["api_key"]
        self.contributors: list[tuple[str, str]] = facts["contributors"]

    def cpu_s(self) -> float:
        """Return the processor time that the server has used so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def memory_bytes(self) -> int:
        """Return the resident memory of the server's process."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Load:
    """Clients of one server.

    Args:
        server: server that receives the requests.
        http: HTTP client that all of them share.
        seed: seed of the random requests and their times.
        pause_s: mean time between the requests of one client.
    """

    def __init__(self, server: Server, http: httpx.AsyncClient, seed: int, pause_s: float) -> None:
        self._server = server
        self._http = http
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._key = {"Authorization": f"Bearer {server.api_key}"}
        self._jobs: list[str] = []
        self.round = Round()
        self._is_warm = False

    async def run(self, clients: int, streams: int, seconds: float) -> Round:
        """Send requests for some time, and return the measurements."""
        for _ in range(FIRST_JOBS):
            await self._submit()
        work = [asyncio.create_task(self._stream()) for _ in range(streams)]
        work += [asyncio.create_task(self._client()) for _ in range(clients - streams)]
        await asyncio.sleep(WARM_UP_S)
        self._is_warm = True
        cpu_s, begin_s = self._server.cpu_s(), time.monotonic()
        await asyncio.sleep(seconds)
        self.round.cpu_share = (self._server.cpu_s() - cpu_s) / (time.monotonic() - begin_s)
        self.round.memory_bytes = self._server.memory_bytes()
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        return self.round

    async def _client(self) -> None:
        does: dict[str, Callable[[], Awaitable[httpx.Response]]] = {
            "health": lambda: self._http.get("/api/v1/health"),
            "list": lambda: self._http.get("/api/v1/jobs", headers=self._key),
            "get": lambda: self._http.get(
                f"/api/v1/jobs/{self._random.choice(self._jobs)}", headers=self._key
            ),
            "submit": self._submit,
            "heartbeat": self._heartbeat,
        }
        await asyncio.sleep(self._random.uniform(0, self._pause_s))
        while True:
            (name,) = self._random.choices(list(MIX), list(MIX.values()))
            begin = time.perf_counter()
            try:
                answer = await does[name]()
                problem = None if answer.is_success else f"{name}: {answer.status_code}"
            except httpx.HTTPError as failure:
                problem = f"{name}: {type(failure).__name__}"
            if self._is_warm:
                self.round.latencies_s.append(time.perf_counter() - begin)
                if problem is not None:
                    self.round.failures[problem] += 1
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))

    async def _submit(self) -> httpx.Response:
        answer = await self._http.post("/api/v1/jobs", headers=self._key, json=JOB)
        if answer.is_success:
            self._jobs.append(answer.json()["id"])
        return answer

    async def _heartbeat(self) -> httpx.Response:
        id_, key = self._random.choice(self._server.contributors)
        return await self._http.post(
            f"/api/v1/contributors/{id_}/heartbeat", headers={"Authorization": f"Bearer {key}"}
        )

    async def _stream(self) -> None:
        headers = {**self._key, "Accept": "text/event-stream"}
        while True:
            try:
                async with self._http.stream(
                    "GET", "/api/v1/events", headers=headers, timeout=None
                ) as answer:
                    async for _ in answer.aiter_raw():
                        pass
            except httpx.HTTPError as failure:
                self.round.failures[f"stream: {type(failure).__name__}"] += 1
                await asyncio.sleep(self._pause_s)


def measure(checkout: Path, options: argparse.Namespace, seed: int) -> Round:
    """Start a server, load it, and end it; return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(checkout, Path(folder) / "data", contributors=20)
        try:

            async def load() -> Round:
                limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.clients)
                async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as http:
                    return await Load(server, http, seed, options.pause).run(
                        options.clients, options.streams, options.seconds
                    )

            return asyncio.run(load())
        finally:
            server.close()


@dataclass
class Beats:
    """Heartbeats that one server answered."""

    per_s: float
    cpu_ms: float
    """Processor time of the server for one heartbeat."""


def measure_heartbeats(checkout: Path, machines: int, seconds: float) -> Beats:
    """Start a server whose machines all train one job, send heartbeats for some time, and end the server."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(checkout, Path(folder) / "data", machines, json.dumps(JOB))
        try:
            asyncio.run(beat(server, 1.0))  # the first answers are slower
            cpu_s, begin_s = server.cpu_s(), time.monotonic()
            count = asyncio.run(beat(server, seconds))
            return Beats(
                per_s=count / (time.monotonic() - begin_s), cpu_ms=1000 * (server.cpu_s() - cpu_s) / count
            )
        finally:
            server.close()


async def beat(server: Server, seconds: float) -> int:
    """Send heartbeats of all machines in turn over `CONNECTIONS` connections; return the number of answers."""
    end_s, count = time.monotonic() + seconds, 0
    machines = itertools.cycle(server.contributors)

    async def send() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        while time.monotonic() < end_s:
            id_, key = next(machines)
            lines = [
                f"POST /api/v1/contributors/{id_}/heartbeat HTTP/1.1",
                "Host: 127.0.0.1",
                f"Authorization: Bearer {key}",
                "Content-Length: 0",
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200"), head
            size = head.partition(b"content-length: ")[2].partition(b"\r")[0]
            assert b'"layer' in await reader.readexactly(int(size))
            count += 1
        writer.close()

    await asyncio.gather(*(send() for _ in range(CONNECTIONS)))
    return count


def print_alone(figure: str, value: float, unit: str, **more: Any) -> None:
    """Print a figure that has no peer."""
    print(json.dumps({"figure": figure, "ours": round(value, 3), "unit": unit, **more}), flush=True)


def compare(ours: list[Round], before: list[Round], options: argparse.Namespace) -> None:
    """Print the figures of the median round of each side."""
    facts = {
        "clients": options.clients,
        "streams": options.streams,
        "rounds": options.rounds,
        "requests": sum(len(one.latencies_s) for one in ours),
        "failures": dict(sum((one.failures for one in ours), Counter())),
    }
    figures: list[tuple[str, str, Callable[[Round], float]]] = [
        ("control_plane_p50", "ms", lambda one: one.percentile_ms(50)),
        ("control_plane_p99", "ms", lambda one: one.percentile_ms(99)),
        ("control_plane_cpu_share", "processors", lambda one: one.cpu_share),
        ("control_plane_memory", "MiB", lambda one: one.memory_bytes / MIB),
    ]
    for name, unit, of in figures:
        own = statistics.median(map(of, ours))
        if not before:
            print_alone(name, own, unit, **facts)
            continue
        other = statistics.median(map(of, before))
        print_figure(
            name,
            ours=own,
            peer=other,
            peer_name=f"before; goal {GOAL} x",
            ratio=GOAL * other / own,
            unit=unit,
            peer_failures=dict(sum((one.failures for one in before), Counter())),
            ours_rounds=[round(of(one), 1) for one in ours],
            peer_rounds=[round(of(one), 1) for one in before],
            **facts,
        )


def compare_heartbeats(ours: list[Beats], before: list[Beats], machines: int) -> None:
    """Print the medians of the rounds of each side."""
    own = statistics.median(one.per_s for one in ours)
    other = statistics.median(one.per_s for one in before) if before else NEEDED_PER_S
    print_figure(
        "heartbeats_per_s",
        ours=own,
        peer=other,
        peer_name="before" if before else "need of 1000 machines",
        ratio=own / other,
        unit="1/s",
        machines=machines,
        ours_cpu_ms=[round(one.cpu_ms, 2) for one in ours],
        peer_cpu_ms=[round(one.cpu_ms, 2) for one in before],
        ours_rounds=[round(one.per_s) for one in ours],
        peer_rounds=[round(one.per_s) for one in before],
    )


def conversation(encode: Callable[[list[dict[str, str]]], int]) -> list[dict[str, str]]:
    """Return a chat of about 500 tokens."""
    text = "The quick brown fox jumps over the lazy dog; say in one sentence why it does so."
    messages: list[dict[str, str]] = []
    while not messages or encode(messages) < 500 or len(messages) % 2 == 0:
        messages.append({"role": "assistant" if len(messages) % 2 else "user", "content": text})
    return messages


def measure_tokenizing(times: int) -> None:
    """Print the extra time of tokenizing a chat in another process, compared with the same calls in this one."""
    from share_compute.data.tokenization import train_tokenizer
    from share_compute_api.openai.requests import ChatRequest
    from share_compute_api.openai.tokenizer_client import TokenizerClient
    from share_compute_api.workers.isolated.messages import TemplateOptions
    from share_compute_api.workers.isolated.pool import IsolatedProcesses
    from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

    window = 4096
    processes = IsolatedProcesses()
    with tempfile.TemporaryDirectory() as folder:
        trained = train_tokenizer(
            ["The quick brown fox jumps over the lazy dog, says one sentence."] * 3, 300
        )
        trained.chat_template = (
            "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        trained.save_pretrained(folder)
        inside = ServedTokenizer(Path(folder))

        def encode(messages: list[dict[str, str]]) -> tuple[int, ...]:
            return inside.encode(inside.chat(messages, TemplateOptions()), window, is_chat=True)

        messages = conversation(lambda so_far: len(encode(so_far)))
        num_tokens = len(encode(messages))
        request = ChatRequest.model_validate({"model": "model", "messages": messages})

        async def run() -> tuple[list[float], list[float]]:
            own: list[float] = []
            other: list[float] = []
            client = await TokenizerClient.load(Path(folder), processes)
            for turn in range(times + 20):
                begin = time.perf_counter()
                there = await client.chat(request, window)
                middle = time.perf_counter()
                here = encode(messages)
                end = time.perf_counter()
                assert there == here
                if turn >= 20:  # the first 20 are warm-up
                    own.append((middle - begin) * 1000)
                    other.append((end - middle) * 1000)
            return own, other

        try:
            own, other = asyncio.run(run())
            worker_bytes = max(psutil.Process(pid).memory_info().rss for pid in processes.pids())
        finally:
            processes.close()
    extra = statistics.median(a - b for a, b in zip(own, other, strict=True))
    print_figure(
        "tokenizing_process_ms",
        ours=extra,
        peer=GOAL_TOKENIZING_MS,
        peer_name="goal",
        ratio=GOAL_TOKENIZING_MS / max(extra, 1e-3),
        unit="ms",
        tokens=num_tokens,
        process_ms=round(statistics.median(own), 3),
        in_process_ms=round(statistics.median(other), 3),
        process_memory_mib=round(worker_bytes / MIB, 1),
    )


def in_turns(
    options: argparse.Namespace, one: Callable[[Path, int], Measured]
) -> tuple[list[Measured], list[Measured]]:
    """Return the rounds of this checkout and of the baseline; ``one`` measures a round, given checkout and number."""
    ours: list[Measured] = []
    before: list[Measured] = []
    for number in range(options.rounds):
        sides = [(ours, OURS)]
        if options.baseline is not None:
            sides.append((before, options.baseline.resolve()))
        # Sides alternate in going first, because the speed of the machine changes over time.
        for rounds, checkout in sides if number % 2 else reversed(sides):
            rounds.append(one(checkout, number))
    return ours, before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: 40 clients for three seconds")
    parser.add_argument("--baseline", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--clients", type=int, default=200, help="at one time")
    parser.add_argument("--streams", type=int, default=20, help="of them, those that hold an event stream")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a round")
    parser.add_argument("--pause", type=float, default=8.0, help="seconds between requests of a client, mean")
    parser.add_argument("--rounds", type=int, default=3, help="of each side")
    parser.add_argument("--machines", type=int, default=1000, help="that send heartbeats")
    parser.add_argument("--only", choices=["heartbeats"], help="measure nothing else")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.streams, options.seconds, options.rounds = 40, 4, 3.0, 1
        options.machines = 50
    length_s = min(options.seconds, 10.0)
    compare_heartbeats(
        *in_turns(options, lambda checkout, _: measure_heartbeats(checkout, options.machines, length_s)),
        options.machines,
    )
    if options.only is not None:
        return
    measure_tokenizing(50 if options.quick else 1000)
    compare(*in_turns(options, lambda checkout, number: measure(checkout, options, number)), options)


if __name__ == "__main__":
    main()
