"""A storm of failures against a job that runs: when each comes, and what the job made of it."""

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
from share_compute.jobs.states import JobState
from share_compute.store.records import EventRecord

StormKind = Literal["kill", "stop", "leave"]
"""The member's process ends; it stands still for a while; its machine is sent away, and hands over what it holds."""
STORM_KINDS: tuple[StormKind, ...] = get_args(StormKind)

_STOP_S = (0.2, 6.0)
"""Shortest and longest time for which a member stands still: some are waited for, some are given up."""
_NOTICED_STEPS = 3
"""Who is lost is missed at once: no more steps than this are committed before."""


@dataclass(frozen=True, slots=True)
class Gust:
    """A failure that is to come.

    Args:
        after_s: from the beginning of the storm.
        kind: what goes wrong.
        place: at whom: from 0, the first of the job's members, to 1, behind the last.
        duration_s: for how long, if it lasts.
    """

    after_s: float
    kind: StormKind
    place: float
    duration_s: float | None = None

    def victim(self, members: Sequence[str]) -> str:
        """Return which of some members it hits; the order in which they come is of no matter."""
        return sorted(members)[int(self.place * len(members))]


def gusts(seed: int, mtbf_s: float, seconds: float, kinds: Sequence[StormKind]) -> Iterator[Gust]:
    """Yield the failures of a storm in their order; equal seeds give equal storms.

    Args:
        seed: of the random numbers.
        mtbf_s: mean time between two failures; the times are exponentially distributed.
        seconds: how long the storm lasts.
        kinds: what goes wrong, each as likely as the other.

    Raises:
        UserError: no kind was given.
    """
    if not kinds:
        raise UserError("a storm without failures", mend=f"give some of {', '.join(STORM_KINDS)}")
    random = Random(seed)  # noqa: S311 - nothing secret
    after_s = random.expovariate(1 / mtbf_s)
    while after_s < seconds:
        kind, place, lasts_s = random.choice(kinds), random.random(), random.uniform(*_STOP_S)
        yield Gust(after_s, kind, place, lasts_s if kind == "stop" else None)
        after_s += random.expovariate(1 / mtbf_s)


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Hit(_View):
    """A failure that happened."""

    kind: StormKind
    contributor_id: str
    machine: str
    at: datetime
    """By the server's clock."""
    duration_s: float | None = None


class HitReport(Hit):
    """What the job made of a failure."""

    step: int
    """Last committed step before it."""
    was_noticed: bool
    """Whether the job went on without this member; else it waited until it was there again."""
    recovered_s: float | None
    """Time until the next step was committed after it was noticed; None: none was."""
    recomputed: int
    """Microbatches that were computed again."""
    restarted_from: int | None = None
    """Step to which the job went back because of it; None: no committed step was lost."""


class Restart(_View):
    """A new attempt at the job."""

    attempt: int
    step: int
    """Step that it continues from."""
    steps_lost: int
    """Committed steps that it computes again; 0: it took over the members of the attempt before."""


class Comparison(_View):
    """Losses of two jobs, step by step."""

    job_id: str
    """The other job."""
    steps: int
    """That both committed."""
    first_difference: int | None
    """First step whose losses differ; None: all are equal, to the last bit."""


class StormReport(_View):
    """How a job came through a storm."""

    job_id: str
    state: JobState
    seed: int
    mtbf_s: float
    seconds: float
    hits: tuple[HitReport, ...]
    missed: int
    """Failures that hit nobody, since no member was there."""
    steps: int
    """Committed during the storm."""
    steps_again: int
    """Committed steps that were lost by restarts, so that they are computed again, during the storm or after it."""
    restarts: tuple[Restart, ...] = ()
    """New attempts, in their order."""
    step_s: float | None
    """Median time from one commit to the next."""
    longest_stall_s: float | None
    """Longest time from one commit to the next."""
    against: Comparison | None = None

    @property
    def unrecovered(self) -> tuple[HitReport, ...]:
        """Failures after which no step was committed."""
        return tuple(hit for hit in self.hits if hit.recovered_s is None)


def assess(hits: Sequence[Hit], events: Sequence[EventRecord], before_step: int = 0) -> tuple[HitReport, ...]:
    """Return what a job made of each failure.

    Args:
        hits: in their order.
        events: of the job, all since the storm began, in their order.
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
    """Return the attempts that began during a storm, with what each computes again.

    Args:
        events: of the job, all since the storm began, in their order.
        attempt: at which the job was when it began.
        step: last committed step by then.
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
    """Return the place of the event by which the job goes on without a member, None if it did not have to."""
    steps = 0
    for place, event in enumerate(after):
        names_it = hit.contributor_id in (*event.data.get("lost", ()), *event.data.get("left", ()))
        if event.kind == "reformed" and names_it:
            return place
        if event.kind == "started" and event.attempt != attempt:
            return place
        steps += event.kind == "step"
        # Who leaves is done without only when what it holds is elsewhere.
        if steps == _NOTICED_STEPS and hit.kind != "leave":
            return None
    return None


def pace(events: Sequence[EventRecord]) -> tuple[int, float | None, float | None]:
    """Return how many steps were committed, and the median and longest time between two, in s."""
    steps = [event for event in events if event.kind == "step"]
    times = [(later.at - earlier.at).total_seconds() for earlier, later in pairwise(steps)]
    return len(steps), statistics.median(times) if times else None, max(times, default=None)


def compare(job_id: str, losses: Mapping[int, float], others: Mapping[int, float]) -> Comparison:
    """Compare the losses of a job with those of another one.

    Args:
        job_id: of the other one.
        losses: by step.
        others: of the other one.
    """
    common = sorted(losses.keys() & others.keys())
    differing = (step for step in common if losses[step] != others[step])
    return Comparison(job_id=job_id, steps=len(common), first_difference=next(differing, None))
