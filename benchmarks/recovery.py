"""Measure the recovery from the death of a machine: seconds to the next committed step, lost steps, equal weights.

Jobs run as under the control plane, on raylets of this machine. Two of a job's machines are killed, one after the
other, each at a random moment of a step: of one only the member's process, of the other all processes including the
raylet. The peer is a restart from the last checkpoint after a member's process died at the same step. Its death is
noticed at once, and all machines are available again, which favours the peer.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from _attempts import Attempt, Machines, Scope, digest
from _harness import job, print_figure, start_cluster

from share_compute.data import prepare
from share_compute.lifecycle.attempt_events import (
    Assignment,
    CheckpointSaved,
    Planned,
    Reformed,
    Started,
    StepCommitted,
)
from share_compute.specification import TrainJob
from share_compute_actors.machine.head import HEALTH_CHECKS

STEPS = 12
CHECKPOINT_EVERY = 4
KILLED_IN = (7, 11)
"""Uncommitted steps in which a machine is killed: half of the steps between two checkpoints are then done."""
MEDIAN_GOAL_S, WORST_GOAL_S = 1.5, 4.0
"""Goals for the seconds from the kill to the next commit: the median without the duration of the step, and the worst
case with it."""

SCOPES: dict[Scope, str] = {
    "member": "the member's process",
    "machine": "all processes of the machine, raylet included",
}
TORCHFT = "installed, but has no side here" if importlib.util.find_spec("torchft") else "not installed"


class Layout(NamedTuple):
    """Layout of stages with equal numbers of members."""

    stages: int
    members: int

    def __str__(self) -> str:
        return f"{self.stages} x {self.members}"

    def job(self, folder: Path) -> TrainJob:
        """Return the job to train."""
        spec = job(folder, STEPS, strategy="uniform", stages=self.stages, members_per_stage=self.members)
        training = spec.training.model_copy(update={"checkpoint_every": CHECKPOINT_EVERY})
        return spec.model_copy(update={"training": training})


LAYOUTS = (Layout(2, 2), Layout(1, 3))


@dataclass
class Pace:
    """Step times of one epoch."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of the epoch's steps, in order."""

    @property
    def step_s(self) -> float:
        """Return the median seconds of a step, without the first one, which is warm-up or includes a recovery."""
        return statistics.median(self.seconds[1:])


class Recovery(NamedTuple):
    """Cost of one death."""

    scope: Scope
    seconds: float
    """Seconds from the kill to the first step that was committed after the membership change."""
    noticed_s: float
    """Seconds from the kill to the coordinator's first sign of it, such as a failed sum."""
    formed_s: float
    """Seconds from then until the lost member was known and the others computed again."""
    step_s: float
    """Median seconds of a step before the kill."""
    recomputed: int
    """Number of microbatches of the uncommitted step that were computed again."""


@dataclass
class Disturbed:
    """Results of a job whose machines were killed."""

    recoveries: list[Recovery] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Numbers of the committed steps, in order."""
    digest: str = ""


class Bench:
    """Trainer of jobs with one layout.

    Args:
        layout: number of stages and of members of each.
        machines: machines to run on.
        folder: folder for the samples and the jobs.
        chance: random generator that chooses victims and moments.
    """

    def __init__(self, layout: Layout, machines: Machines, folder: Path, chance: random.Random) -> None:
        self.layout = layout
        self._machines = machines
        self._folder = folder
        self._chance = chance
        self._spec = layout.job(folder)
        self._jobs = 0
        prepare(self._spec, folder / "data")

    def disturbed(self, *kills: Scope) -> Disturbed:
        """Train a job and kill one machine for each of ``kills``; return the results."""
        assignment = self._assign()
        found, pace = Disturbed(), Pace()
        waiting = dict(zip(KILLED_IN, kills, strict=False))
        killed_s = computed_s = 0.0
        reformed: Reformed | None = None
        stages: list[set[str]] = []
        for event, now_s in Attempt(assignment).events():
            match event:
                case Planned():
                    stages = _stages(event)
                case Reformed():
                    stages = _stages(event)
                    if event.lost:
                        reformed, computed_s = event, now_s
                case StepCommitted():
                    found.steps.append(event.step)
                    if reformed is not None:
                        found.recoveries.append(
                            Recovery(
                                scope=kills[len(found.recoveries)],
                                seconds=now_s - killed_s,
                                noticed_s=computed_s - reformed.seconds - killed_s,
                                formed_s=reformed.seconds,
                                step_s=pace.step_s,
                                recomputed=reformed.recomputed,
                            )
                        )
                        reformed, pace = None, Pace()
                    pace.seconds.append(event.seconds)
                    if event.step + 1 in waiting:
                        # The only member of a stage is spared, because no other member could take over from it.
                        victims = sorted(worker for stage in stages if len(stage) > 1 for worker in stage)
                        killed_s = self._kill(self._chance.choice(victims), waiting[event.step + 1], pace)
        self._machines.bury()
        found.digest = digest(assignment.folder)
        shutil.rmtree(assignment.folder)
        if len(found.recoveries) != len(kills):
            raise RuntimeError(f"{len(kills)} machines were killed, {len(found.recoveries)} were missed")
        return found

    def restarted(self) -> Disturbed:
        """Train a job, kill a member, and restart from the last checkpoint; return the results."""
        assignment = self._assign()
        found, pace = Disturbed(), Pace()
        checkpoint: Path | None = None
        killed_s = started_s = 0.0
        with closing(Attempt(assignment).events()) as events:
            for event, _ in events:
                if isinstance(event, CheckpointSaved):
                    checkpoint = event.path
                elif isinstance(event, StepCommitted):
                    found.steps.append(event.step)
                    pace.seconds.append(event.seconds)
                    if event.step + 1 == KILLED_IN[0]:
                        machines = assignment.topology.contributors
                        killed_s = self._kill(self._chance.choice(machines).id, "member", pace)
                        break  # closing the events ends the rest of the attempt at once
        again = assignment.model_copy(update={"attempt": 2, "checkpoint": checkpoint})
        for event, now_s in Attempt(again).events():
            if isinstance(event, Started):
                started_s = now_s - killed_s
            elif isinstance(event, StepCommitted):
                found.steps.append(event.step)
                if event.step == KILLED_IN[0]:
                    found.recoveries.append(
                        Recovery("member", now_s - killed_s, 0.0, started_s, pace.step_s, 0)
                    )
        found.digest = digest(assignment.folder)
        shutil.rmtree(assignment.folder)
        return found

    def _assign(self) -> Assignment:
        self._jobs += 1
        folder = self._folder / f"job-{self._jobs}"
        shutil.copytree(self._folder / "data", folder / "data")
        return Assignment(
            job_id=f"recovery-{self.layout.stages}-{self._jobs}",
            attempt=1,
            spec=self._spec,
            topology=self._machines.topology(self.layout.stages * self.layout.members),
            folder=folder,
        )

    def _kill(self, worker: str, scope: Scope, pace: Pace) -> float:
        """Kill at a random moment of the step that has just begun; return the time (monotonic clock, in seconds)."""
        kill = self._machines.killing(worker, scope)
        time.sleep(self._chance.uniform(0.1, 0.9) * pace.step_s)
        now_s = time.monotonic()
        kill()
        return now_s


def _stages(event: Planned | Reformed) -> list[set[str]]:
    return [{member.contributor_id for member in stage.members} for stage in event.plan.stages]


def repeated(run: Disturbed) -> int:
    """Return the number of committed steps that were repeated."""
    return len(run.steps) - len(set(run.steps))


def report(layout: Layout, runs: Sequence[Disturbed], restarts: Sequence[Disturbed], calm: str) -> None:
    """Print the figures of one layout."""
    peer = {"peer_name": "restart from the last checkpoint", "layout": str(layout)}
    restart = [death for run in restarts for death in run.recoveries]
    for scope, killed in SCOPES.items():
        report_time(
            [death for run in runs for death in run.recoveries if death.scope == scope],
            restart,
            {"layout": str(layout), "killed": killed},
        )
    lost = max(map(repeated, runs))
    print_figure(
        "steps_lost",
        ours=lost,
        peer=statistics.mean(map(repeated, restarts)),
        ratio=float(lost == 0),
        unit="steps of a job",
        **peer,
        statistic="worst; the peer's mean",
        checkpoint_every=CHECKPOINT_EVERY,
    )
    equal = statistics.mean(run.digest == calm for run in runs)
    print_figure(
        "digest_equal",
        ours=equal,
        peer=statistics.mean(run.digest == calm for run in restarts),
        ratio=equal,
        unit="share of jobs",
        **peer,
        jobs=len(runs),
    )


def report_time(deaths: Sequence[Recovery], restarts: Sequence[Recovery], what: dict[str, str]) -> None:
    """Print the time until the next committed step, compared with a restart and with the goals."""

    def median(take: Callable[[Recovery], float], of: Sequence[Recovery] = deaths) -> float:
        return statistics.median(map(take, of))

    seconds, restart = median(lambda death: death.seconds), median(lambda death: death.seconds, restarts)
    print_figure(
        "kill_to_next_commit",
        ours=seconds,
        peer=restart,
        peer_name="restart from the last checkpoint",
        ratio=restart / seconds,
        unit="s",
        statistic="median",
        **what,
        noticed_s=round(median(lambda death: death.noticed_s), 3),
        formed_s=round(median(lambda death: death.formed_s), 3),
        peer_formed_s=round(median(lambda death: death.formed_s, restarts), 3),
        step_s=round(median(lambda death: death.step_s), 3),
        microbatches_recomputed=median(lambda death: death.recomputed),
        all_s=sorted(round(death.seconds, 2) for death in deaths),
        peer_all_s=sorted(round(death.seconds, 2) for death in restarts),
        torchft=TORCHFT,
    )
    beyond, worst = median(lambda death: death.seconds - death.step_s), max(death.seconds for death in deaths)
    for statistic, own, goal in (
        ("median, beyond one step", beyond, MEDIAN_GOAL_S),
        ("worst", worst, WORST_GOAL_S),
    ):
        print_figure(
            "kill_to_next_commit",
            ours=own,
            peer=goal,
            peer_name="goal",
            ratio=goal / max(own, 1e-3),
            unit="s",
            statistic=statistic,
            **what,
            kills=len(deaths),
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: one job of one layout")
    parser.add_argument("--jobs", type=int, default=10, help="for each layout; two machines die in each")
    parser.add_argument("--restarts", type=int, default=3, help="of the peer, for each layout")
    options = parser.parse_args()
    if options.quick:
        options.jobs = options.restarts = 1
    os.environ |= HEALTH_CHECKS
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as name, start_cluster() as cluster:
        machines = Machines(cluster)
        for layout in LAYOUTS[-1:] if options.quick else LAYOUTS:
            folder = Path(name) / str(layout).replace(" ", "")
            folder.mkdir()
            bench = Bench(layout, machines, folder, chance)
            calm = bench.disturbed().digest
            restarts = [bench.restarted() for _ in range(options.restarts)]
            orders: tuple[list[Scope], list[Scope]] = (["member", "machine"], ["machine", "member"])
            runs = [bench.disturbed(*orders[number % 2]) for number in range(options.jobs)]
            report(layout, runs, restarts, calm)


if __name__ == "__main__":
    main()
