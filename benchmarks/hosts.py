"""Measure stalls, lost steps and equality of weights when hosts, links and processes of a real cluster fail.

A server and four machines have network namespaces of their own, with addresses on one bridge (`tests/hosts`), so this
needs Linux and root. Links are cut by dropping packets. Processes are killed where they run. Faults are drawn at
random and injected one after the other while a job trains; the next one comes when all machines are ready again. The
peer is the goal.

A stall is the longest time between two committed steps around a fault. For a cut of the server it counts from the end
of the cut.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from _harness import print_figure

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.conftest import ready, run_command, run_server, wait_for
from tests.hosts.cluster import Cluster, run_cluster
from tests.hosts.network import Direction, has_title

from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.models.storage.weights import WeightFolder
from share_compute.store import EventRecord
from share_compute_api.client.client import Client

STEPS = 3000
UNDISTURBED_STEPS = 150
LAST_FAULT_STEP = 2500
DEADLINE_S = 600.0
MACHINES = 4
SETTLING_S = 3.0
"""Seconds for which a job must go on after a fault before the next: the server notices the loss of a member in 2 s."""
WIDTH = 256


def job(name: str, steps: int) -> dict[str, Any]:
    """Return a small job over three stages with steps of about 20 ms, which is the resolution of measured stalls.

    It sets the number of microbatches. Otherwise each plan would choose it, and digests could be compared only between
    jobs with equal numbers.
    """
    sizes = (64, WIDTH, WIDTH, 10)
    layers: list[dict[str, Any]] = []
    for before, after in itertools.pairwise(sizes):
        layers += [
            {"type": "linear", "options": {"in_features": before, "out_features": after}},
            {"type": "relu"},
        ]
    return {
        "name": name,
        "model": {"layers": layers[:-1]},
        "data": {"dataset": "digits"},
        "training": {"steps": steps, "batch_size": 64, "microbatches": 2, "optimizer": {"name": "adamw"}},
        "parallelism": {"stages": 3},
    }


class Fault(NamedTuple):
    """One kind of injected fault."""

    figure: str
    """Name of the figure that its stall counts for; empty if no figure with a goal."""
    detail: str
    inflict: Callable[[Hosts, str], float]
    """Function that injects the fault, given the name of a machine of the job; returns the seconds that it waited."""


@dataclass
class Disturbed:
    """Results of the faults of one run."""

    stalls: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    repeated: int = 0
    equal: list[bool] = field(default_factory=list)
    faults: int = 0


class Hosts:
    """A cluster into whose hosts, links and processes faults can be injected."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self.cluster = cluster
        self._stack = stack
        self._folder = cluster.server.data_folder

    def client(self) -> Client:
        """Return a client of the server."""
        return Client(self.cluster.server.url, self.cluster.server.api_key)

    def all_ready(self) -> bool:
        """Return whether the server answers and each machine is ready."""
        with suppress(Exception), self.client() as client:
            return all(ready(client, name) is not None for name in self.cluster.machines)
        return False

    def join_again(self, name: str) -> None:
        """Restart the agent of a machine with its stored key, as its service manager would."""
        host = self.cluster.machines[name]
        given = ("--memory", "600MiB", "--cpu-threads", "1", "--device", "cpu", "--json", "--insecure")
        joining = ("join", self.cluster.server.url, "--name", name, "--address", host.address, *given)
        folder = str(self._folder / "contributors")
        self._stack.enter_context(
            run_command(self._folder, *joining, inside=host.inside, SHARE_COMPUTE_DATA_FOLDER=folder)
        )

    def start_server_again(self) -> None:
        """Restart the control plane at the same address."""
        host, port = self.cluster.host, int(self.cluster.server.url.rpartition(":")[2])
        listening = ("--host", host.address, "--insecure")
        self._stack.enter_context(run_server(self._folder, *listening, port=port, inside=host.inside))


# -- faults ------------------------------------------------------------------------------------------------------------


def cut(seconds: float, direction: Direction, *, of_server: bool) -> Callable[[Hosts, str], float]:
    """Return a fault that cuts a host from all others for ``seconds``."""

    def inflict(hosts: Hosts, victim: str) -> float:
        host = hosts.cluster.host if of_server else hosts.cluster.machines[victim]
        with host.cut_from(hosts.cluster.others(host), direction):
            time.sleep(seconds)
        return seconds

    return inflict


def cut_pair(hosts: Hosts, victim: str) -> float:
    """Cut a machine for ten seconds from one that it exchanges tensors with; return the seconds."""
    with hosts.client() as client:
        leased_to = next(each.job_id for each in client.contributors() if each.name == victim)
        assert leased_to is not None
        plan = client.job(leased_to).plan
    assert plan is not None
    stages = [[member.name for member in stage.members] for stage in plan.stages]
    neighbours = next((each for each in itertools.pairwise(stages) if victim in each[0] + each[1]), None)
    # A machine that holds no layer yet, or a plan of one stage: its members sum gradients.
    one, other = (neighbours[0][0], neighbours[1][0]) if neighbours else (stages[0][0], stages[0][-1])
    with hosts.cluster.machines[one].cut_from([hosts.cluster.machines[other]], "both"):
        time.sleep(10)
    return 10.0


def kill(
    word: str, *, of_server: bool = False, then: Callable[[Hosts, str], None] | None = None
) -> Callable[[Hosts, str], float]:
    """Return a fault that kills the processes with this title."""

    def inflict(hosts: Hosts, victim: str) -> float:
        host = hosts.cluster.host if of_server else hosts.cluster.machines[victim]

        def is_killed() -> bool:
            with suppress(RuntimeError):
                host.kill(has_title(word))
                return True
            return False

        wait_for(is_killed, f"a process {word} to kill", DEADLINE_S)  # a member may just be starting
        if then is not None:
            then(hosts, victim)
        return 0.0

    return inflict


def is_command(command: str) -> Callable[[psutil.Process], bool]:
    """Return a predicate: whether a process runs this command of share-compute itself, not a wrapper or a child."""
    return lambda process: command in process.cmdline()[:6] and process.name() != "ip"


def kill_agent(hosts: Hosts, victim: str) -> float:
    """Kill the agent of a machine, and restart it after a second; return 0.0."""
    hosts.cluster.machines[victim].kill(is_command("join"))
    time.sleep(1.0)
    hosts.join_again(victim)
    return 0.0


def kill_server(hosts: Hosts, _: str) -> float:
    """Kill the control plane, and restart it; return 0.0."""
    hosts.cluster.host.kill(is_command("up"))
    hosts.start_server_again()
    return 0.0


CUTS = [
    *(
        Fault("stall_contributor_lost", f"cut {s:g} s", cut(s, "both", of_server=False))
        for s in (1, 5, 30, 120)
    ),
    *(Fault("stall_server_cut", f"cut {s:g} s", cut(s, "both", of_server=True)) for s in (4, 30, 300)),
    Fault("stall_server_cut", "cut 10 s, incoming", cut(10, "in", of_server=True)),
    Fault("stall_server_cut", "cut 10 s, outgoing", cut(10, "out", of_server=True)),
    Fault("stall_contributor_lost", "cut 10 s, incoming", cut(10, "in", of_server=False)),
    Fault("stall_contributor_lost", "cut 10 s, outgoing", cut(10, "out", of_server=False)),
    Fault("stall_pair_cut", "cut 10 s", cut_pair),
]
KILLS = [
    Fault("stall_gcs_killed", "gcs_server", kill("gcs_server", of_server=True)),
    Fault("stall_contributor_lost", "member", kill("ray::Member")),
    Fault("stall_contributor_lost", "raylet", kill("raylet")),
    Fault("", "agent", kill_agent),
    Fault("", "coordinator", kill("ray::Coordinator", of_server=True)),
    Fault("", "control plane", kill_server),
]
GOALS_S = {
    "stall_contributor_lost": 3.0,
    "stall_pair_cut": 10.0,
    "stall_server_cut": 5.0,
    "stall_gcs_killed": 10.0,
}


# -- jobs --------------------------------------------------------------------------------------------------------------


def all_events(client: Client, job_id: str) -> list[EventRecord]:
    """Return all events of a job."""
    found: list[EventRecord] = []
    while (page := client.events(job_id, after=found[-1].seq if found else 0)).events:
        found += page.events
    return found


def steps_of(events: Sequence[EventRecord]) -> list[tuple[int, datetime]]:
    """Return the committed steps with their times, in the order in which they were reported."""
    return [(event.data["step"], event.at) for event in events if event.kind == "step"]


def finished(hosts: Hosts, job_id: str) -> tuple[list[EventRecord], str]:
    """Wait for the end of a job; return its events and the digest of its weights."""

    def ended() -> bool:
        with suppress(OSError), hosts.client() as client:
            return client.job(job_id).state.is_final
        return False

    wait_for(ended, "the end of the job", DEADLINE_S)
    with hosts.client() as client:
        found = client.job(job_id)
        if found.state is not JobState.succeeded:
            raise RuntimeError(f"{job_id} {found.state.value}: {found.reason}")
        (model,) = client.artifacts(job_id)
        return all_events(client, job_id), WeightFolder(model.path).digest()


def disturb(
    hosts: Hosts, faults: Iterator[Fault], chance: random.Random, calm: str, found: Disturbed
) -> bool:
    """Train one job while faults are injected; return whether there are more faults."""
    with hosts.client() as client:
        job_id = client.submit(job("disturbed", STEPS)).id
    marks: list[tuple[Fault, datetime, datetime]] = []
    more = True
    while True:
        step = settled(hosts, job_id)
        if step is None or step > LAST_FAULT_STEP:
            break
        with hosts.client() as client:
            at_work = working(client, job_id)
        if not at_work:  # it has just ended
            continue
        if (fault := next(faults, None)) is None:
            more = False
            break
        time.sleep(chance.uniform(0.0, 1.0))
        victim = chance.choice(at_work)
        begun = datetime.now(UTC)
        fault.inflict(hosts, victim)
        marks.append((fault, begun, datetime.now(UTC)))
        found.faults += 1
        print(
            f"{found.faults}: {fault.figure} {fault.detail} ({victim}) at step {step}",
            file=sys.stderr,
            flush=True,
        )
    events, digest = finished(hosts, job_id)
    steps = steps_of(events)
    repeated = len(steps) - len({step for step, _ in steps})
    found.repeated += repeated
    if repeated:  # a job went back: the log shows why
        for event in events:
            if event.kind not in {"step", "measured", "layers-timed"}:
                print(
                    f"   {event.at:%H:%M:%S} {event.attempt} {event.kind} {event.data}"[:300], file=sys.stderr
                )
    found.equal.append(digest == calm)
    ends = [*(begun for _, begun, _ in marks[1:]), datetime.max.replace(tzinfo=UTC)][: len(marks)]
    for (fault, begun, ended), until in zip(marks, ends, strict=True):
        seconds = stall(steps, ended if fault.figure == "stall_server_cut" else begun, until)
        found.stalls[fault.figure, fault.detail].append(seconds)
        print(f"   {fault.figure} {fault.detail}: {seconds:.2f} s", file=sys.stderr, flush=True)
    return more


def stall(steps: Sequence[tuple[int, datetime]], since: datetime, until: datetime) -> float:
    """Return the longest time between two consecutive steps, in seconds.

    Only pairs count whose later step is in this period; time before ``since`` is not counted.
    """
    times = [at for _, at in steps]
    gaps = [
        (after - max(before, since)).total_seconds()
        for before, after in itertools.pairwise(times)
        if since <= after < until
    ]
    return max(gaps, default=float("inf"))


def settled(hosts: Hosts, job_id: str) -> int | None:
    """Wait until the job is protected and makes steps with all machines ready; return its step, or None at its end."""

    def next_step() -> int | None:
        with suppress(OSError), hosts.client() as client:
            found = client.job(job_id)
            if found.state.is_final:
                return -1
            if not (found.state is JobState.running and found.is_protected and hosts.all_ready()):
                return None
            last = found.step
            time.sleep(SETTLING_S)
            now = client.job(job_id)
            is_settled = now.is_protected and hosts.all_ready() and now.step >= last + 10
            return now.step if is_settled or now.state.is_final else None
        return None

    step = wait_for(next_step, "steps with all machines", DEADLINE_S)
    return None if step == -1 else step


def working(client: Client, job_id: str) -> list[str]:
    """Return the names of the ready machines that are leased to the job, sorted."""
    machines = [each for each in client.contributors() if each.state is ContributorState.ready]
    return sorted(each.name for each in machines if each.job_id == job_id)


# -- figures -----------------------------------------------------------------------------------------------------------


def report(found: Disturbed, resolver: str) -> None:
    """Print the costs of the faults."""
    more: dict[str, Any] = {"peer_name": "goal", "resolver": resolver, "faults": found.faults}
    print_figure(
        "steps_lost", ours=found.repeated, peer=0, ratio=float(found.repeated == 0), unit="steps", **more
    )
    equal = statistics.mean(found.equal)
    print_figure(
        "digest_equal", ours=equal, peer=1.0, ratio=equal, unit="share of jobs", jobs=len(found.equal), **more
    )
    for figure, goal in GOALS_S.items():
        stalls = [one for (name, _), each in found.stalls.items() if name == figure for one in each]
        if not stalls:
            continue
        details = {
            detail: [round(one, 2) for one in each]
            for (name, detail), each in found.stalls.items()
            if name == figure
        }
        for statistic, ours in (("median", statistics.median(stalls)), ("worst", max(stalls))):
            ratio = goal / max(ours, 1e-3)
            print_figure(
                figure,
                ours=ours,
                peer=goal,
                ratio=ratio,
                unit="s",
                statistic=statistic,
                all_s=details,
                **more,
            )
    details = {
        detail: [round(one, 2) for one in each] for (name, detail), each in found.stalls.items() if not name
    }
    if details:
        stalls = [one for each in details.values() for one in each]
        print_figure(
            "stall_others",
            ours=statistics.median(stalls),
            peer=0,
            ratio=1.0,
            unit="s",
            statistic="median",
            all_s=details,
            **more,
        )


def undisturbed(hosts: Hosts, resolver: str) -> None:
    """Print how often a job without faults is replanned."""
    with hosts.client() as client:
        events, _ = finished(hosts, client.submit(job("undisturbed", UNDISTURBED_STEPS)).id)
    replans = sum(event.kind == "replan-proposed" for event in events)
    steps = [step for step, _ in steps_of(events)]
    repeated = (
        len(steps)
        - len(set(steps))
        + sum(event.data["recomputed"] for event in events if event.kind == "reformed")
    )
    more: dict[str, Any] = {"peer_name": "goal", "resolver": resolver, "steps": UNDISTURBED_STEPS}
    print_figure("replans_undisturbed", ours=replans, peer=1, ratio=1 / max(replans, 1), unit="plans", **more)
    print_figure(
        "steps_repeated_undisturbed",
        ours=repeated,
        peer=0,
        ratio=float(repeated == 0),
        unit="steps or microbatches",
        **more,
    )


def drawn(options: argparse.Namespace, chance: random.Random) -> Iterator[Fault]:
    """Return the faults in random order."""
    if options.only:
        chosen = [fault for fault in (*CUTS, *KILLS) if options.only in f"{fault.figure} {fault.detail}"]
        faults = [*itertools.islice(itertools.cycle(chosen), options.faults)]
    elif options.quick:
        faults = [CUTS[1], CUTS[4], KILLS[0], KILLS[1]]
    else:
        often = [*CUTS[:2], *CUTS[7:], *KILLS]
        faults = [
            *CUTS,
            *KILLS,
            *itertools.islice(itertools.cycle(often), max(0, options.faults - len(CUTS) - len(KILLS))),
        ]
        chance.shuffle(faults)
    return iter(faults)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: four faults")
    parser.add_argument("--faults", type=int, default=50, help="for each kind of resolver")
    parser.add_argument("--only", default="", help="only faults whose description has this")
    parser.add_argument("--resolvers", nargs="*", default=["reachable", "unreachable"])
    options = parser.parse_args()
    chance = random.Random(0)
    for resolver in options.resolvers[:1] if options.quick else options.resolvers:
        with redirect_stdout(sys.stderr), ExitStack() as stack:
            cluster = stack.enter_context(run_cluster(MACHINES, is_resolver_dead=resolver == "unreachable"))
            hosts = Hosts(cluster, stack)
            with redirect_stdout(sys.__stdout__):
                undisturbed(hosts, resolver)
            with hosts.client() as client:
                calm_id = client.submit(job("calm", STEPS)).id
            _, calm = finished(hosts, calm_id)
            found = Disturbed()
            faults = drawn(options, chance)
            try:
                while disturb(hosts, faults, chance, calm, found):
                    pass
            finally:
                if found.equal:
                    with redirect_stdout(sys.__stdout__):
                        report(found, resolver)


if __name__ == "__main__":
    main()
