"""Measure the pause of eight streams over two stages when a process fails, and whether the texts are equal.

First, machines are raylets of this machine. SIGKILL ends a stage's process at token 64, the first and the last one in
turn. Its machine stays, so it is used again before the next round. The peer is a service without recovery: it starts
the deployment anew and generates the same tokens again.

Then clients stream from a server with three machines that joined it. SIGKILL ends the server of the replica, and
SIGSTOP suspends a member for 5 s. After that, SIGKILL ends the control plane, which is started again on the same data
folder; clients resume their streams by id. Last, clients ask a deployment that is scaled to zero, with and without
reserved machines.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from _attempts import Machines
from _harness import print_figure, start_cluster
from _serving import Served, Streams, make_model
from inference import CONFIG, VOCABULARY, WINDOW

sys.path.insert(0, str(Path(__file__).parents[1]))
import psutil
from openai import OpenAI
from tests.api.speaking import make_llama
from tests.conftest import RunningServer, descendants, run_contributor, run_server, served, wait_for

from share_compute.inference.scheduler.events import Finished
from share_compute.topology import Topology
from share_compute_api.client.client import Client

STREAMS, PROMPT, NEW, KILLED_AT = 8, 32, 128, 64
STAGES, MACHINES = 2, 3
MEDIAN_GOAL_MS = 2500.0
COLD_START_GOAL_MS = 3000.0
API_GOAL_MS = 5000.0
API_WINDOW, API_NEW, STRUCK_AT = 512, 300, 40
"""Longest sequence, new tokens of each stream, and pieces of text after which a process fails."""
SUSPENDED_S = 5.0
PARTS = ("members", "server", "suspensions", "control-plane", "cold-starts")

Asking = TypeVar("Asking", OpenAI, Client)


class Round(NamedTuple):
    """Results of one death."""

    gap_s: float
    """Longest pause of a stream, from its last token before the kill on."""
    usual_s: float
    """Median time between two tokens of a stream before the kill."""
    recomputed: int
    """Number of positions whose caches were lost or discarded, and that were computed again."""
    is_exact: bool
    errors: int


def prompts(chance: random.Random) -> list[list[int]]:
    """Return new random prompts."""
    return [[chance.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(STREAMS)]


def disturbed(served: Served, wanted: list[list[int]], texts: list[list[int]], stage: int) -> Round:
    """Generate, and kill a stage when all streams have some tokens; return the results."""
    while (doomed := served.wait_for(STAGES).stages[stage].process_id) is None:
        time.sleep(0.1)  # it has not reported yet
    streams = served.submit(wanted, NEW)
    served.follow(streams, lambda: all(len(text) >= KILLED_AT for text in streams.texts))
    before = {sequence: len(tokens) for sequence, tokens in streams.tokens.items()}
    os.kill(doomed, signal.SIGKILL)
    served.follow(streams)
    gaps = [
        max(b - a for a, b in pairwise(times[before[one] - 1 :])) for one, times in streams.times_s.items()
    ]
    return Round(
        max(gaps),
        statistics.median(_intervals(streams, KILLED_AT)),
        sum(PROMPT + count for count in before.values()),
        streams.texts == texts,
        sum(not isinstance(end, Finished) for end in streams.ends.values()),
    )


def _intervals(streams: Streams, count: int) -> list[float]:
    return [b - a for times in streams.times_s.values() for a, b in pairwise(times[:count])]


def restarted(folder: Path, topology: Topology, wanted: list[list[int]]) -> float:
    """Return the seconds in which a new deployment generates the tokens up to the kill again."""
    served = Served(folder, topology, WINDOW, parallelism={"stages": STAGES}, max_concurrent=STREAMS)
    streams = served.follow(served.submit(wanted, KILLED_AT))
    served.close()
    return streams.seconds


class ApiCluster:
    """A server with machines that joined it, and clients of its API.

    Args:
        place: folder for the model and the server's data.
        stack: ends everything.
        port: port of the server; 0 for a free one.
    """

    def __init__(self, place: Path, stack: ExitStack, port: int = 0) -> None:
        self._place = place
        self._stack = stack
        self._port = port
        self.folder = make_llama(
            place / "files" / "model", window=API_WINDOW, hidden_size=64, num_hidden_layers=4
        )
        self.start_server()
        self.machines = [stack.enter_context(run_contributor(self.server)) for _ in range(MACHINES)]
        self.client = stack.enter_context(self.server.client())
        self.openai = stack.enter_context(
            OpenAI(base_url=f"{self.server.url}/v1", api_key=self.server.api_key, max_retries=0, timeout=120)
        )

    def start_server(self) -> None:
        """Start the server, on the data of an earlier one if there was one."""
        start = run_server(self._place / "data", port=self._port, data_root=self.folder.parent)
        self.server: RunningServer = self._stack.enter_context(start)

    @property
    def running(self) -> list[Any]:
        """The server and its machines."""
        return [self.server, *self.machines]

    def deploy(self, **more: Any) -> None:
        """Deploy the model over several stages."""
        model = {"name": "llama", "model": {"path": str(self.folder)}, "parallelism": {"stages": STAGES}}
        self.client.deploy({**model, **more})

    def is_whole(self) -> bool:
        """Return whether all stages serve."""
        return served(self.client, "llama", STAGES) is not None


@contextmanager
def api_cluster(port: int = 0) -> Iterator[ApiCluster]:
    """Give a server with machines, and end them afterwards."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        yield ApiCluster(Path(name), stack, port)


class ApiRound(NamedTuple):
    """Results of one failure that clients of the API met."""

    gap_s: float
    """Longest pause of a stream after the failure began."""
    is_exact: bool
    errors: int


def stream(openai: OpenAI, number: int, texts: dict[int, list[tuple[float, str]]]) -> None:
    """Add the pieces of one stream, with their times, to ``texts``."""
    pieces = texts.setdefault(number, [])
    answer = openai.completions.create(
        model="llama",
        prompt=f"the quick brown fox {number}",
        max_tokens=API_NEW,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in answer:
        pieces += [(time.perf_counter(), choice.text) for choice in chunk.choices]


def struck(
    client: Asking,
    ask: Callable[[Asking, int, dict[int, list[tuple[float, str]]]], None],
    strike: Callable[[], None] | None,
    expected: list[str],
) -> tuple[ApiRound, list[str]]:
    """Run all streams at once, call ``strike`` when each has some text, and return the result and the texts."""
    texts: dict[int, list[tuple[float, str]]] = {}
    begun_s = 0.0
    with ThreadPoolExecutor(STREAMS) as threads:
        running = [threads.submit(ask, client, number, texts) for number in range(STREAMS)]
        if strike is not None:
            wait_for(
                lambda: len(texts) == STREAMS and all(len(pieces) > STRUCK_AT for pieces in texts.values()),
                "text of all streams",
            )
            begun_s = time.perf_counter()
            strike()
        errors = sum(each.exception() is not None for each in running)
    whole = ["".join(text for _, text in texts[number]) for number in range(STREAMS)]
    # The pause begins with the last piece before the failure.
    gaps = [
        late - max(early, begun_s)
        for pieces in texts.values()
        for (early, _), (late, _) in pairwise(pieces)
        if late > begun_s
    ]
    return ApiRound(max(gaps), whole == expected, errors), whole


def kill_server(server: RunningServer) -> None:
    """Kill the process that leads the replica."""
    for process in descendants("ray::DeploymentServer", server.command.process.pid):
        process.kill()


def members_of(machine: Any) -> list[psutil.Process]:
    """Return the serving members on a machine."""
    return descendants("ray::ServingMember", machine.command.process.pid)


def suspend_member(machines: list[Any]) -> None:
    """Suspend one member for some seconds; do not wait for the end of that."""
    chosen = random.choice([member for machine in machines for member in members_of(machine)])
    chosen.suspend()
    time.sleep(SUSPENDED_S)
    if chosen.is_running():
        chosen.resume()


def measure_server_deaths(rounds: int) -> None:
    """Measure the pauses of streams when the process that leads the replica is killed, and print them."""
    with api_cluster() as cluster:
        cluster.deploy()
        wait_for(cluster.is_whole, "both stages")
        _, expected = struck(cluster.openai, stream, None, [])
        results = []
        for _ in range(rounds):
            wait_for(cluster.is_whole, "both stages again")
            kill = struck(cluster.openai, stream, lambda: kill_server(cluster.server), expected)
            results.append(kill[0])
        print_api_figure("gap_server_death_ms", results)


def measure_suspensions(rounds: int) -> None:
    """Measure the pauses of streams when a member is suspended for some seconds, and print them.

    Each round has a deployment of its own: a deployment uses a machine that it loses again and again ever more rarely.
    """
    with api_cluster() as cluster:
        expected: list[str] = []
        results = []
        for _ in range(rounds):
            cluster.deploy()
            wait_for(cluster.is_whole, "both stages")
            if not expected:
                _, expected = struck(cluster.openai, stream, None, [])
            suspension = struck(cluster.openai, stream, lambda: suspend_member(cluster.machines), expected)
            results.append(suspension[0])
            cluster.client.undeploy("llama")
            wait_for(lambda: not any(map(members_of, cluster.machines)), "the end of all members")
        print_api_figure("gap_sigstop_ms", results)


def print_api_figure(figure: str, results: list[ApiRound], **more: int) -> None:
    """Print the pauses of all rounds of one failure."""
    gaps_ms = [1000 * one.gap_s for one in results]
    print_figure(
        figure,
        ours=statistics.median(gaps_ms),
        peer=API_GOAL_MS,
        peer_name="goal",
        ratio=API_GOAL_MS / statistics.median(gaps_ms),
        unit="ms",
        worst=round(max(gaps_ms)),
        gaps=[round(gap) for gap in gaps_ms],
        token_exact=sum(one.is_exact for one in results),
        client_errors=sum(one.errors for one in results),
        streams=STREAMS,
        rounds=len(results),
        **more,
    )


def resumable_stream(client: Client, number: int, texts: dict[int, list[tuple[float, str]]]) -> None:
    """Add the pieces of one stream, with their times, to ``texts``; the client resumes the stream if it breaks."""
    pieces = texts.setdefault(number, [])
    answer = client.complete(
        "llama", f"the quick brown fox {number}", max_tokens=API_NEW, temperature=0, ignore_eos=True
    )
    for piece in answer:
        pieces.append((time.perf_counter(), piece))


def measure_control_plane(rounds: int) -> None:
    """Measure the pauses of resumable streams when the control plane is killed and started again, and print them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with api_cluster(port) as cluster:
        client = cluster.client
        cluster.deploy()
        restarts_ms: list[float] = []

        def kill() -> None:
            begun_s = time.perf_counter()
            cluster.server.command.process.kill()
            cluster.server.command.process.wait()
            cluster.start_server()
            wait_for(lambda: client.health().status == "ok", "an answer of the server")
            restarts_ms.append(1000 * (time.perf_counter() - begun_s))

        wait_for(cluster.is_whole, "both stages")
        _, expected = struck(client, resumable_stream, None, [])
        results = []
        for _ in range(rounds):
            wait_for(cluster.is_whole, "both stages again")
            results.append(struck(client, resumable_stream, kill, expected)[0])
        print_api_figure("gap_control_plane_ms", results, restart_ms=round(statistics.median(restarts_ms)))


class ColdStart(NamedTuple):
    """One request to a deployment that was scaled to zero, and what ran just before it."""

    wait_ms: float
    text: str
    processes: int
    """Number of processes of the server and of all machines."""
    memory_bytes: int
    """Memory that these processes do not share with others."""


def cold_starts(cluster: ApiCluster, num_standby: int, rounds: int) -> list[ColdStart]:
    """Ask a deployment at zero several times.

    Args:
        cluster: the server, with a deployment.
        num_standby: number of replicas that stand by while the deployment is at zero.
        rounds: number of requests.
    """

    def is_at_zero() -> bool:
        counts = cluster.client.deployment("llama").replicas
        return counts is not None and (counts.wanted, counts.draining, counts.standby) == (0, 0, num_standby)

    results = []
    for _ in range(rounds):
        wait_for(is_at_zero, "a deployment at zero")
        roots = [one.command.process.pid for one in cluster.running]
        running = [process for root in roots for process in descendants("", root)]
        memory_bytes = sum(process.memory_full_info().uss for process in running if process.is_running())
        begun_s = time.perf_counter()
        answer = cluster.openai.completions.create(
            model="llama", prompt="the quick brown fox", max_tokens=1, temperature=0
        )
        wait_ms = 1000 * (time.perf_counter() - begun_s)
        results.append(ColdStart(wait_ms, answer.choices[0].text, len(running), memory_bytes))
    return results


def measure_cold_starts(rounds: int) -> None:
    """Measure the time to the first token of requests to a deployment at zero, and print it."""
    with api_cluster() as cluster:
        replicas = {"min": 0, "max": 1, "downscale_to_zero_delay_s": 1}
        cluster.deploy(replicas=replicas)
        for figure, reserve in (("cold_start_reserved_ms", True), ("cold_start_ms", False)):
            cluster.client.scale("llama", {**replicas, "reserve": reserve})
            results = cold_starts(cluster, int(reserve), rounds)
            waits_ms = [one.wait_ms for one in results]
            median_ms = statistics.median(waits_ms)
            half = len(results) // 2
            early, late = results[half // 2 : half + 1], results[-half // 2 :]
            print_figure(
                figure,
                ours=median_ms,
                peer=COLD_START_GOAL_MS,
                peer_name="goal with warm processes",
                ratio=COLD_START_GOAL_MS / median_ms,
                unit="ms",
                worst=round(max(waits_ms)),
                waits=[round(wait) for wait in waits_ms],
                token_exact=len({one.text for one in results}) == 1,
                processes=[min(one.processes for one in early), max(one.processes for one in late)],
                memory_growth=round(
                    statistics.median(one.memory_bytes for one in late)
                    / statistics.median(one.memory_bytes for one in early)
                    - 1,
                    4,
                ),
                rounds=rounds,
            )


def measure_member_deaths(deaths: int, chance: random.Random, restarts: int) -> None:
    """Measure the pauses of streams when processes of stages are killed, and print them.

    Args:
        deaths: number of kills.
        chance: draws the prompts.
        restarts: number of times that the service without recovery starts.
    """
    with tempfile.TemporaryDirectory() as name, start_cluster() as cluster:
        folder = Path(name) / "model"
        make_model(folder, **CONFIG)
        topology = Machines(cluster).topology(MACHINES)
        served = Served(folder, topology, WINDOW, parallelism={"stages": STAGES}, max_concurrent=STREAMS)
        wanted = prompts(chance)
        served.wait_for(STAGES)
        texts = served.follow(served.submit(wanted, NEW)).texts
        rounds = [disturbed(served, wanted, texts, number % STAGES) for number in range(deaths)]
        recoveries = served.status().recoveries
        served.close()
        restart_s = statistics.median(restarted(folder, topology, wanted) for _ in range(restarts))
    gaps_ms = [1000 * (one.gap_s - one.usual_s) for one in rounds]
    exact = sum(one.is_exact for one in rounds)
    print_figure(
        "token_exact",
        ours=exact,
        peer=deaths,
        peer_name="goal: every round the tokens of the undisturbed run",
        ratio=exact / deaths,
        unit="rounds",
        client_errors=sum(one.errors for one in rounds),
        recoveries=recoveries,
    )
    print_figure(
        "gap_ms",
        ours=statistics.median(gaps_ms),
        peer=1000 * restart_s,
        peer_name="a new deployment that generates again what was there",
        ratio=1000 * restart_s / statistics.median(gaps_ms),
        unit="ms",
        worst=round(max(gaps_ms)),
        goal_median=MEDIAN_GOAL_MS,
        tokens_recomputed=round(statistics.median(one.recomputed for one in rounds)),
        usual_ms=round(1000 * statistics.median(one.usual_s for one in rounds), 1),
        gaps=[round(gap) for gap in gaps_ms],
        streams=STREAMS,
        deaths=deaths,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: two deaths")
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--cold-starts", type=int, default=50, help="requests to a deployment at zero")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure; default: all"
    )
    options = parser.parse_args()
    deaths, starts = (2, 4) if options.quick else (options.deaths, options.cold_starts)
    if "members" in options.only:
        measure_member_deaths(deaths, random.Random(options.seed), 1 if options.quick else 3)
    if "server" in options.only:
        measure_server_deaths(deaths)
    if "suspensions" in options.only:
        measure_suspensions(deaths)
    if "control-plane" in options.only:
        measure_control_plane(deaths)
    if "cold-starts" in options.only:
        measure_cold_starts(starts)


if __name__ == "__main__":
    main()
