"""Draws a random schedule of failures to inject into a job (a storm), and evaluates the job's reaction to each one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from random import Random
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from share_compute.errors import UserError
from share_compute.lifecycle.states import JobState
from share_compute.store.records import EventRecord

StormKind = Literal["kill", "stop", "leave"]
"""kill: a member's process ends. stop: the process is suspended. leave: the member's machine is drained and removed."""
STORM_KINDS: tuple[StormKind, ...] = get_args(StormKind)

_STOP_S = (0.2, 6.0)
"""Shortest and longest suspension of a member, in seconds."""
_NOTICED_STEPS = 3
"""Number of steps that a job commits after a failure, without a reaction, before it counts as having waited for
the member."""


@dataclass(frozen=True, slots=True)
class Gust:
    """A scheduled failure of a storm.

    Args:
        after_s: time of the failure, in seconds from the beginning of the storm.
        kind: kind of the failure.
        place: position in [0, 1) that selects the affected member from the job's sorted members.
        duration_s: duration of a ``stop``, in seconds; None for other kinds.
    """

    after_s: float
    kind: StormKind
    place: float
    duration_s: float | None = None

    def victim(self, members: Sequence[str]) -> str:
        """Return the member that the failure affects; the result does not depend on the order of ``members``."""
        return sorted(members)[int(self.place * len(members))]


def gusts(seed: int, mtbf_s: float, seconds: float, kinds: Sequence[StormKind]) -> Iterator[Gust]:
    """Yield the failures of a storm in order of time; equal arguments give equal storms.

    Args:
        seed: seed of the random numbers.
        mtbf_s: mean time between two failures, in seconds; the times are exponentially distributed.
        seconds: duration of the storm, in seconds.
        kinds: kinds of failures, all equally likely.

    Raises:
        UserError: no kind was given.
    """
    if not kinds:
        raise UserError("a storm without failures", hint=f"give some of {', '.join(STORM_KINDS)}")
    random = Random(seed)  # noqa: S311 - nothing secret
    after_s = random.expovariate(1 / mtbf_s)
    while after_s < seconds:
        kind, place, lasts_s = random.choice(kinds), random.random(), random.uniform(*_STOP_S)
        yield Gust(after_s, kind, place, lasts_s if kind == "stop" else None)
        after_s += random.expovariate(1 / mtbf_s)


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True)


class Hit(_FrozenModel):
    """A failure that was injected."""

    kind: StormKind
    contributor_id: str
    machine: str
    at: datetime
    """Time of the failure, by the server's clock."""
    duration_s: float | None = None


class HitReport(Hit):
    """A failure and the job's reaction to it."""

    step: int
    """Last step that was committed before the failure."""
    was_noticed: bool
    """Whether the job reacted: it continued without the member, or a new attempt began."""
    recovered_s: float | None
    """Time from the failure to the first commit after the job's reaction, in seconds; None if there was no such commit.

    If the job did not react, the first commit after the failure counts.
    """
    recomputed: int
    """Number of microbatches that the job recomputed when it continued without the member."""
    restarted_from: int | None = None
    """Step after which a new attempt continued; None if no committed step was lost."""


class Restart(_FrozenModel):
    """An attempt of the job that began during or after the storm."""

    attempt: int
    step: int
    """Step after which the attempt continues."""
    steps_lost: int
    """Number of committed steps that the attempt recomputes."""


class Comparison(_FrozenModel):
    """Comparison of the losses of two jobs, step by step."""

    job_id: str
    """Id of the other job."""
    steps: int
    """Number of steps that both jobs committed."""
    first_difference: int | None
    """First step at which the losses differ; None if all losses are bit-identical."""


class StormReport(_FrozenModel):
    """Report of a storm: the failures, and the progress of the job."""

    job_id: str
    state: JobState
    seed: int
    mtbf_s: float
    seconds: float
    hits: tuple[HitReport, ...]
    missed: int
    """Number of scheduled failures that could not be injected."""
    steps: int
    """Number of commits during the storm and the recovery after it, repeated steps included."""
    steps_again: int
    """Number of committed steps that restarts lost."""
    restarts: tuple[Restart, ...] = ()
    """New attempts, in order."""
    step_s: float | None
    """Median time between consecutive commits, in seconds; None if there were fewer than two commits."""
    longest_stall_s: float | None
    """Longest time between consecutive commits, in seconds; None if there were fewer than two commits."""
    against: Comparison | None = None

    @property
    def unrecovered(self) -> tuple[HitReport, ...]:
        """Failures after which no step was committed."""
        return tuple(hit for hit in self.hits if hit.recovered_s is None)


def assess(hits: Sequence[Hit], events: Sequence[EventRecord], before_step: int = 0) -> tuple[HitReport, ...]:
    """Return a report for each failure that was injected.

    Args:
        hits: failures, in order.
        events: all events of the job since the storm began, in order.
        before_step: last step that was committed before the storm.
    """
    return tuple(_assess(hit, events, before_step) for hit in hits)


def _assess(hit: Hit, events: Sequence[EventRecord], before_step: int) -> HitReport:
    before = [event for event in events if event.at <= hit.at]
    after = events[len(before) :]
    notice = _notice(hit, after, before[-1].attempt if before else None)
    rest = after if notice is None else after[notice:]
    recovery = next((event for event in rest if event.kind == "step"), None)
    noticed = None if notice is None else after[notice]
    committed = [int(event.data["step"]) for event in before if event.kind == "step"]
    return HitReport(
        **hit.model_dump(),
        step=max(committed, default=before_step),
        was_noticed=noticed is not None,
        recovered_s=None if recovery is None else (recovery.at - hit.at).total_seconds(),
        recomputed=0 if noticed is None else noticed.data.get("recomputed", 0),
        restarted_from=_restarted_from(noticed, before_step if not committed else committed[-1]),
    )


def _restarted_from(noticed: EventRecord | None, last_step: int) -> int | None:
    if noticed is None or noticed.kind != "started":
        return None
    step = int(noticed.data["first_step"]) - 1
    return step if step < last_step else None


def restarts(events: Sequence[EventRecord], attempt: int, step: int) -> tuple[Restart, ...]:
    """Return the attempts that began since the start of a storm, each with the number of steps that it recomputes.

    Args:
        events: all events of the job since the storm began, in order.
        attempt: number of the attempt that ran when the storm began.
        step: last step that was committed before the storm.
    """
    found = []
    for event in events:
        if event.kind == "step":
            step = int(event.data["step"])
        elif event.kind == "started" and event.attempt is not None and event.attempt != attempt:
            attempt, first = event.attempt, int(event.data["first_step"])
            found.append(Restart(attempt=attempt, step=first - 1, steps_lost=max(0, step - first + 1)))
            step = first - 1
    return tuple(found)


def _notice(hit: Hit, after: Sequence[EventRecord], attempt: int | None) -> int | None:
    """Return the index of the event with the job's reaction to the failure; None if there is none."""
    steps = 0
    for place, event in enumerate(after):
        names_it = hit.contributor_id in (*event.data.get("lost", ()), *event.data.get("left", ()))
        if event.kind == "reformed" and names_it:
            return place
        if event.kind == "started" and event.attempt != attempt:
            return place
        steps += event.kind == "step"
        # A draining member is dropped only after its shards have moved, which may take any number of steps.
        if steps == _NOTICED_STEPS and hit.kind != "leave":
            return None
    return None


def pace(events: Sequence[EventRecord]) -> tuple[int, float | None, float | None]:
    """Return the number of commits, and the median and longest time between consecutive commits, in seconds.

    The times are None if there are fewer than two commits.
    """
    steps = [event for event in events if event.kind == "step"]
    times = [(later.at - earlier.at).total_seconds() for earlier, later in pairwise(steps)]
    return len(steps), statistics.median(times) if times else None, max(times, default=None)


def compare(job_id: str, losses: Mapping[int, float], others: Mapping[int, float]) -> Comparison:
    """Compare the losses of a job with those of another job, step by step.

    Args:
        job_id: id of the other job.
        losses: losses of the first job, by step.
        others: losses of the other job, by step.
    """
    common = sorted(losses.keys() & others.keys())
    differing = (step for step in common if losses[step] != others[step])
    return Comparison(job_id=job_id, steps=len(common), first_difference=next(differing, None))
