"""Soak test: members of a job die and rejoin for many minutes; measure lost steps, stalls and memory growth.

The machines are raylets of this machine. A member dies every 20 seconds on average, at random. Its machine stays, so
it is used again when that pays. The same job without deaths shows how the loss should fall.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from _attempts import Attempt, Machines, digest
from _harness import job, print_figure, start_cluster

from share_compute.data import prepare
from share_compute.lifecycle.attempt_events import Assignment, Reformed, StepCommitted
from share_compute.specification import TrainJob

MACHINES = 3
MEAN_S = 20.0
"""Mean time between two deaths."""
WARM_S = 60.0
"""Warm-up time before memory is compared."""
SAMPLE_S = 5.0
GROWTH_GOAL = 0.03
_ROLES = ("ray::Member", "ray::Coordinator", "ray::ShardStore")


@dataclass
class Soaked:
    """Results of a job."""

    losses: dict[int, float] = field(default_factory=dict)
    """Loss by step."""
    steps: list[int] = field(default_factory=list)
    """Numbers of the committed steps, in order."""
    step_s: list[float] = field(default_factory=list)
    deaths: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    """Times without computation after a death."""
    rejoins_s: list[float] = field(default_factory=list)
    """Times from a death until a step was committed by as many members as before."""
    stalls_s: list[float] = field(default_factory=list)
    """Times without computation while a machine joined."""
    digest: str = ""


class Killer(threading.Thread):
    """Thread that kills members at random times until a deadline, or until it is stopped.

    Args:
        machines: machines of the members.
        stages: ids of the members of each stage; the caller keeps this list up to date.
        until_s: deadline (monotonic clock, in seconds).
        seed: seed of the random moments and victims.
    """

    def __init__(self, machines: Machines, stages: list[set[str]], until_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self._machines = machines
        self._stages = stages
        self._until_s = until_s
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self.missed: set[str] = set()
        """Ids of members that were killed and not reported as lost yet."""
        self.deaths = 0

    def run(self) -> None:
        """Kill a random member, unless fewer than two are alive; repeat after random times."""
        while not self._over.wait(self._chance.expovariate(1 / MEAN_S)):
            members = sorted(
                worker for stage in list(self._stages) for worker in stage if worker not in self.missed
            )
            if time.monotonic() > self._until_s:
                return
            if len(members) < 2:
                continue
            victim = self._chance.choice(members)
            try:
                kill = self._machines.killing(victim, "member")
            except RuntimeError:  # the member is dead already
                continue
            self.missed.add(victim)
            self.deaths += 1
            kill()

    def stop(self) -> None:
        """Stop the thread: no further member is killed."""
        self._over.set()
        if self.ident is not None:
            self.join()


class Scale(threading.Thread):
    """Thread that samples the memory of all processes of a job."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.largest_bytes: list[int] = []
        """Memory of the largest member, by sample."""
        self.lasting_bytes: list[int] = []
        """Total memory of the processes that live as long as the job, by sample."""

    def run(self) -> None:
        """Sample memory until stopped."""
        while not self._over.wait(SAMPLE_S):
            members, lasting = [], 0
            for process in psutil.process_iter(["cmdline", "memory_info"]):
                title = " ".join(process.info["cmdline"] or ())
                if title.startswith(_ROLES) and process.info["memory_info"] is not None:
                    size = process.info["memory_info"].rss
                    if title.startswith("ray::Member"):
                        members.append(size)
                    else:
                        lasting += size
            if members:
                self.largest_bytes.append(max(members))
                self.lasting_bytes.append(lasting)

    def stop(self) -> None:
        """Stop the thread."""
        self._over.set()
        self.join()


def train(assignment: Assignment, machines: Machines | None, until_s: float) -> Soaked:
    """Train a job, and kill members of ``machines``, if given, until ``until_s``; return the results."""
    found = Soaked()
    stages: list[set[str]] = []
    killer = Killer(machines, stages, until_s, seed=0) if machines is not None else None
    wanted, short_since_s = 0, None
    for event, now_s in Attempt(assignment).events():
        count = sum(map(len, stages))
        plan = getattr(event, "plan", None)
        if plan is not None and event.type in ("planned", "reformed"):
            stages[:] = [{member.contributor_id for member in stage.members} for stage in plan.stages]
        if event.type == "started" and killer is not None:
            killer.start()
        elif isinstance(event, Reformed):
            if killer is not None:
                killer.missed -= set(event.lost)
            if sum(map(len, stages)) < count and short_since_s is None:
                wanted, short_since_s = count, now_s - event.seconds
            if event.joined:
                found.stalls_s.append(event.seconds)
            elif event.lost:
                found.recoveries_s.append(event.seconds)
        elif isinstance(event, StepCommitted):
            found.steps.append(event.step)
            found.losses[event.step] = event.loss
            found.step_s.append(event.seconds)
            if short_since_s is not None and count >= wanted:
                found.rejoins_s.append(now_s - short_since_s)
                short_since_s = None
    if killer is not None:
        killer.stop()
        found.deaths = killer.deaths
    found.digest = digest(assignment.folder)
    shutil.rmtree(assignment.folder)
    return found


def growth(sizes: Sequence[int]) -> float:
    """Return the relative growth from the first quarter after the warm-up to the last quarter."""
    warm = list(sizes[int(WARM_S / SAMPLE_S) :]) or list(sizes)
    quarter = max(1, len(warm) // 4)
    return statistics.median(warm[-quarter:]) / statistics.median(warm[:quarter]) - 1


def assignment(folder: Path, number: int, machines: Machines, spec: TrainJob) -> Assignment:
    """Return the assignment of the job, with a folder of its own."""
    own = folder / f"job-{number}"
    shutil.copytree(folder / "data", own / "data")
    return Assignment(
        job_id=f"soak-{number}",
        attempt=1,
        spec=spec,
        topology=machines.topology(MACHINES),
        folder=own,
        drift=1e6,  # no replanning: equal machines that share two cores make predictions meaningless
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of deaths")
    parser.add_argument("--steps", type=int, default=1500, help="of the job; should take about as long")
    parser.add_argument("--checkpoint-every", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, start_cluster() as cluster:
        folder = Path(name)
        spec = job(folder, options.steps, stages=1)
        training = spec.training.model_copy(update={"checkpoint_every": options.checkpoint_every})
        spec = spec.model_copy(update={"training": training})
        prepare(spec, folder / "data")
        machines = Machines(cluster)
        calm = train(assignment(folder, 1, machines, spec), None, 0.0)
        scale = Scale()
        scale.start()
        until_s = time.monotonic() + options.minutes * 60
        soaked = train(assignment(folder, 2, machines, spec), machines, until_s)
        scale.stop()
    report(calm, soaked, scale, options.steps)


def report(calm: Soaked, soaked: Soaked, scale: Scale, steps: int) -> None:
    """Print the figures."""
    step_s = statistics.median(calm.step_s)
    lost = steps - len(set(soaked.steps)) + len(soaked.steps) - len(set(soaked.steps))
    print_figure(
        "soak_commits_lost",
        ours=lost,
        peer=0,
        peer_name="goal",
        ratio=float(lost == 0),
        unit="steps",
        deaths=soaked.deaths,
        rejoins=len(soaked.stalls_s),
        steps=steps,
        recovery_median_s=round(statistics.median(soaked.recoveries_s or [0.0]), 3),
        recovery_worst_s=round(max(soaked.recoveries_s or [0.0]), 3),
    )
    is_equal = soaked.losses == calm.losses and soaked.digest == calm.digest
    print_figure(
        "soak_equal",
        ours=float(is_equal),
        peer=1.0,
        peer_name="the undisturbed job",
        ratio=float(is_equal),
        unit="losses and weights, bit for bit",
        different=sum(soaked.losses.get(step) != loss for step, loss in calm.losses.items()),
    )
    for what, sizes in (
        ("largest member", scale.largest_bytes),
        ("coordinator and shard store", scale.lasting_bytes),
    ):
        grown = growth(sizes)
        print_figure(
            "soak_memory_growth",
            ours=grown,
            peer=GROWTH_GOAL,
            peer_name="goal",
            ratio=float(grown <= GROWTH_GOAL),
            unit="share of resident memory, last against first quarter",
            what=what,
            samples=len(sizes),
        )
    if soaked.rejoins_s and soaked.stalls_s:
        print_figure(
            "rejoin_to_first_commit",
            ours=statistics.median(soaked.rejoins_s),
            peer=step_s,
            peer_name="one undisturbed step",
            ratio=step_s / statistics.median(soaked.rejoins_s),
            unit="s",
            statistic="median, from a death until as many members as before",
        )
        print_figure(
            "rejoin_stall",
            ours=max(soaked.stalls_s),
            peer=step_s,
            peer_name="one undisturbed step (goal)",
            ratio=step_s / max(soaked.stalls_s),
            unit="s",
            statistic="worst",
            all_s=[round(each, 3) for each in sorted(soaked.stalls_s)],
        )


if __name__ == "__main__":
    main()
