"""Scenarios of a simulated world: its size, its network and its failures. Drawn from a seed, or written down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random

from tests.simulated_world.network import Weather

from share_compute.protocol.failures import FailureKind, InjectedFailure
from share_compute.protocol.membership import Worker
from share_compute.protocol.points import Point


class UpsetKind(Enum):
    """Kind of event that happens to the world at some time, whatever the protocol is doing."""

    kill = "kill"
    """A machine dies, unless the job's state would be lost. A new machine of the same name comes later."""
    stop = "stop"
    """A machine stalls for ``amount`` seconds."""
    suspect = "suspect"
    """A machine is taken for lost although it is alive."""
    drain = "drain"
    """A machine leaves."""
    stages = "stages"
    """``amount`` stages are wanted from the next epoch on."""
    kill_coordinator = "kill coordinator"
    """The coordinator dies."""
    rival = "rival"
    """Another coordinator starts although one is alive."""


@dataclass(frozen=True, slots=True)
class Upset:
    """An event at a given time.

    Args:
        time_s: time of the event, in seconds.
        kind: kind of the event.
        worker: name of the machine that it happens to.
        amount: number of seconds or of stages, where the kind needs one.
    """

    time_s: float
    kind: UpsetKind
    worker: Worker = ""
    amount: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run of a job.

    Args:
        seed: seed for delays, results of broken reductions, and owners of microbatches.
        machines: number of machines.
        stages: number of stages wanted at first; not more than machines or layers.
        late: number of these machines that join later.
        layers: number of layers of the model.
        runs: microbatches of a step, as in `SummationTree`.
        is_tied: whether the first and the last layer share their parameter.
        shares_optimizer: whether each member of a stage updates only a share of its layers.
        pauses: steps after which the job pauses; the last one ends it.
        weather: rates of random network failures.
        failures: failures at points of the protocol.
        upsets: events at given times.
        diverges_at: step, microbatch and layer whose output is not finite on any machine; None for a sound model.
    """

    seed: int = 0
    machines: int = 3
    stages: int = 2
    late: int = 0
    layers: int = 4
    runs: tuple[int, ...] = (2, 2)
    is_tied: bool = False
    shares_optimizer: bool = False
    pauses: tuple[int, ...] = (3,)
    weather: Weather = field(default_factory=Weather)
    failures: tuple[InjectedFailure, ...] = ()
    upsets: tuple[Upset, ...] = ()
    diverges_at: tuple[int, int, int] | None = None

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Names of all machines."""
        return tuple(chr(ord("a") + place) for place in range(self.machines))

    @property
    def steps(self) -> int:
        """Number of steps of the job."""
        return self.pauses[-1]


SPAN_S = 60.0
"""Time in seconds in which most of a drawn scenario's steps fall."""


def draw(seed: int, most: int = 3) -> Scenario:
    """Return a scenario with failures of any kind. The same seed gives the same scenario.

    Args:
        seed: seed for all draws.
        most: largest number of failures at points, and largest number of events at times.
    """
    random = Random(seed)
    machines = random.randint(1, 6)
    stages = random.randint(1, min(4, machines))
    steps = random.randint(2, 4)
    pauses = {steps, *random.sample(range(1, steps), random.randint(0, 1))}
    weather = Weather(
        late=random.choice([0.0, 0.1, 0.3]),
        doubled=random.choice([0.0, 0.1, 0.3]),
        lost=random.choice([0.0, 0.0, 0.03, 0.1]),
        until_s=2 * SPAN_S,
    )
    scenario = Scenario(
        seed=seed,
        machines=machines,
        stages=stages,
        late=random.randint(0, machines - stages) if random.random() < 0.3 else 0,
        layers=random.randint(stages, 4),
        runs=tuple(random.randint(1, 3) for _ in range(random.randint(1, 3))),
        is_tied=random.random() < 0.4 and stages > 1,
        pauses=tuple(sorted(pauses)),
        weather=weather,
    )
    workers = scenario.workers
    failures = tuple(_failure(random, workers, steps) for _ in range(random.randint(0, most)))
    upsets = tuple(_upset(random, workers, scenario.layers) for _ in range(random.randint(0, most)))
    return replace(scenario, failures=failures, upsets=upsets)


KINDS = tuple(kind for kind in FailureKind if not kind.is_offence)
"""Failures of processes and messages, not of numbers."""


def draw_wrong(seed: int, most: int = 3) -> Scenario:
    """Return a drawn scenario in which some machines also send wrong numbers; the same for the same seed.

    Numbers that are not finite are made once. Two machines that both make such numbers in one step count as a model
    that diverges. In some scenarios the model does diverge, and no machine is wrong. In others one machine rejects
    tensors that are sound.
    """
    random = Random(-seed - 1)
    scenario = draw(seed, most)
    if random.random() < 0.1:
        cell = random.randint(1, scenario.steps), random.randrange(sum(scenario.runs))
        return replace(scenario, diverges_at=(*cell, random.randrange(scenario.layers)))
    misfits = (FailureKind.reshape, FailureKind.retype, FailureKind.resize)
    kinds = [(random.choice(misfits), Point.tensor_sending) for _ in range(random.randint(0, 2))]
    if random.random() < 0.5:
        kinds.append((FailureKind.poison, random.choice((Point.tensor_sending, Point.cell_starting))))
    if random.random() < 0.5:
        kinds.append((FailureKind.deviate, Point.prepared_sending))
    wrong = tuple(
        InjectedFailure(
            kind=kind,
            point=point,
            worker=random.choice([None, *scenario.workers]),
            step=random.choice([None, random.randint(1, scenario.steps)]),
            occurrence=random.choice([1, 1, 2, 3]),
        )
        for kind, point in kinds
    )
    liar = random.choice(scenario.workers)
    lies = tuple(
        InjectedFailure(FailureKind.accuse, Point.tensor_received, liar, occurrence=random.randint(1, 8))
        for _ in range(random.choice([0, 0, 1, 2, 3]))
    )
    return replace(scenario, failures=(*scenario.failures, *wrong, *lies))


_LASTING_S = (3.0, 12.0, 40.0)


def _failure(random: Random, workers: tuple[Worker, ...], steps: int) -> InjectedFailure:
    point = random.choice(list(Point))
    kinds = [kind for kind in KINDS if point.is_sending or not kind.is_of_message]
    kind = random.choice([*kinds, FailureKind.kill])
    peers = frozenset(random.sample(workers, random.randint(0, len(workers) - 1)))
    return InjectedFailure(
        kind=kind,
        point=point,
        worker=random.choice([None, *workers]) if point.role == "member" else None,
        step=random.choice([None, random.randint(1, steps)]),
        occurrence=random.choice([1, 1, 1, 2, 3]),
        duration_s=random.choice(_LASTING_S) if kind.lasts else 0.0,
        peers=peers if kind is FailureKind.partition else frozenset(),
    )


def _upset(random: Random, workers: tuple[Worker, ...], layers: int) -> Upset:
    kind = random.choice(list(UpsetKind))
    amount = random.randint(1, layers) if kind is UpsetKind.stages else int(random.choice(_LASTING_S))
    return Upset(SPAN_S * random.random(), kind, random.choice(workers), amount)
