"""History of the machines' work, read from events as periods of work.

Each change of a machine's work is an event of kind ``work``. The event names the job or the deployment that the machine
is leased to, and the part of the model that the machine holds. The part is missing before the plan is made. Job and
deployment are both null when the machine becomes free. When a machine leaves or is lost, its work ends with its
``contributor`` event, without a ``work`` event.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, func, insert, or_, select
from sqlalchemy.orm import Session

from share_compute.lifecycle.states import GONE
from share_compute.lifecycle.work import (
    NO_WORK,
    BusyRecord,
    WorkPeriodRecord,
    WorkRecord,
    WorkSums,
)
from share_compute.store.database.database import HAS_EVENTS, Database
from share_compute.store.database.tables import ContributorRow, DeploymentRow, EventRow

KIND = "work"
FREE: dict[str, Any] = {"job": None, "deployment": None}
"""Data of the ``work`` event of a machine that has become free."""
_EVENTS_AT_ONCE = 50_000
"""Largest range of event numbers in which `WorkHistory.total` counts steps in one call: some tens of milliseconds."""
_PERIODS_AT_ONCE = 200
NEW_EVENTS = 5_000
"""Largest range of event numbers that several calls of `WorkHistory.total` count at the same time."""
BLOCK_EVENTS = 10_000
"""Size of the ranges of event numbers whose steps are counted once for all machines of a job."""
_MOST_BLOCKS = 10_000
"""Maximum number of ranges whose counts are kept."""
_MOST_TOTALS = 4096
"""Maximum number of machines whose running totals are kept; those of other machines are counted anew."""


def record_work(session: Session, now: datetime, work: Mapping[str, dict[str, Any]]) -> None:
    """Write ``work`` events; ``work`` holds the data of each contributor's event, by contributor id."""
    if work:
        rows = [
            {"kind": KIND, "at": now, "data": data, "contributor_id": machine}
            for machine, data in work.items()
        ]
        session.execute(insert(EventRow), rows)
        session.info[HAS_EVENTS] = True


def parts(*plans: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {contributor id: part of the model that it holds} for the machines of these plans.

    For a machine that trains several branches of a job, the layers are those of the first of these branches;
    microbatches and memory are summed.

    Args:
        plans: plans in the JSON form in which rows store them.
    """
    return {machine: part for plan in plans for machine, part in _parts(plan).items()}


def _parts(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    # Rows of older releases lack branches.
    branches = [branch["stages"] for branch in plan.get("branches") or ()] or [plan["stages"]]
    found: dict[str, dict[str, Any]] = {}
    for stages in branches:
        for place, stage in enumerate(stages):
            for member in stage["members"]:
                part = found.setdefault(
                    member["contributor_id"],
                    {
                        "start": stage["start"],
                        "stop": stage["stop"],
                        "num_layers": plan["num_layers"],
                        "stage": place,
                        "microbatches": 0,
                        # The samples of a step event are summed over all branches.
                        "of_microbatches": plan["microbatches"] * len(branches),
                        "memory_bytes": 0,
                    },
                )
                part["microbatches"] += len(member["microbatches"])
                part["memory_bytes"] += member["memory_bytes"]
    return found


def record_free(session: Session, now: datetime, *held: Any) -> None:
    """Write ``work`` events for machines that become free; call this before the machines are released.

    Args:
        session: session of the transaction.
        now: current time.
        held: SQL conditions that select the machines.
    """
    record_work(session, now, dict.fromkeys(session.scalars(select(ContributorRow.id).where(*held)), FREE))


@dataclass(slots=True)
class _Period:
    """Period of a machine's work between two events; ``ended`` is None while the period lasts."""

    data: dict[str, Any]
    begun: EventRow
    ended: EventRow | None = None


@dataclass(frozen=True, slots=True)
class _Total:
    """Running total of a machine's work in the events up to number ``seq``."""

    seq: int = 0
    ended: WorkSums = NO_WORK
    """Sums of the periods that have ended."""
    data: Mapping[str, Any] | None = None
    """Data of the event with which the present period began; None while the machine is free."""
    began_at: datetime | None = None
    steps: int = 0
    """Steps in the present period."""
    samples: int = 0
    """Samples of these steps, of all machines."""

    def sums(self, now: datetime) -> WorkSums:
        """Return the sums of all periods; the present period counts up to ``now``."""
        if self.data is None or self.began_at is None:
            return self.ended
        holds_part = self.data.get("num_layers") is not None
        seconds = max(0.0, (now - self.began_at).total_seconds()) if holds_part else 0.0
        return WorkSums(
            seconds=self.ended.seconds + seconds,
            steps=self.ended.steps + self.steps,
            microbatches=self.ended.microbatches + self.steps * (self.data.get("microbatches") or 0),
            samples=self.ended.samples + _own_samples(self.data, self.samples),
        )


class WorkHistory:
    """History of the machines' work, read from events.

    Args:
        database: the database with the events.
        clock: function that returns the current time in UTC.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._totals: OrderedDict[str, _Total] = OrderedDict()
        """Running totals by contributor id; the one that was used last is at the end."""
        self._blocks: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
        """Steps of a job in a block of event numbers, and their samples, by job id and block."""
        self._counting_earlier = threading.Lock()
        """Held while a call counts more than `NEW_EVENTS`."""

    def total(self, contributor_id: str, *, most_events: int = _EVENTS_AT_ONCE) -> WorkSums | None:
        """Return the sums of all work of a machine; None while earlier events are being counted.

        Each call counts only events that were written after the last call. After a start of the server, the first calls
        count earlier events in pieces, and for one machine at a time, so that no heartbeat waits for long.

        Args:
            contributor_id: id of the machine.
            most_events: largest range of event numbers in which this call counts steps.
        """
        with self._lock:
            known = self._totals.get(contributor_id, _Total())
        with self._database.read() as session:
            newest = session.scalar(select(func.max(EventRow.seq))) or 0
            are_many = newest - known.seq > NEW_EVENTS
            if are_many and not self._counting_earlier.acquire(blocking=False):
                return None
            try:
                total = self._counted(session, contributor_id, known, newest, most_events)
            finally:
                if are_many:
                    self._counting_earlier.release()
        with self._lock:
            later = self._totals.get(contributor_id)
            if later is None or later.seq < total.seq:
                self._totals[contributor_id] = total
            self._totals.move_to_end(contributor_id)
            while len(self._totals) > _MOST_TOTALS:
                self._totals.popitem(last=False)
        return None if total.seq < newest else total.sums(self._clock())

    def _counted(
        self, session: Session, contributor_id: str, total: _Total, newest: int, most_events: int
    ) -> _Total:
        """Return a running total with the events up to ``newest``, or up to a lower number if there are too many."""
        own = (
            select(EventRow)
            .where(EventRow.contributor_id == contributor_id, changes_work())
            .order_by(EventRow.seq)
        )
        for _ in range(_PERIODS_AT_ONCE):
            change = session.scalar(own.where(EventRow.seq > total.seq, EventRow.seq <= newest).limit(1))
            end = newest if change is None else change.seq
            if total.data is not None and _trains(total.data):
                last = total.seq + most_events
                block_end = last - last % BLOCK_EVENTS
                last = min(end, block_end if block_end > total.seq else last)
                steps, samples = self._steps_between(session, total.data["job"], total.seq, last)
                most_events -= last - total.seq
                total = replace(total, seq=last, steps=total.steps + steps, samples=total.samples + samples)
                if last < end:
                    return total
            if change is None:
                return replace(total, seq=newest)
            begins = _begins_work(change)
            total = _Total(
                seq=change.seq,
                ended=total.sums(change.at),
                data=change.data if begins else None,
                began_at=change.at if begins else None,
            )
        return total

    def _steps_between(self, session: Session, job_id: str, after: int, last: int) -> tuple[int, int]:
        """Return the number of a job's steps in the events from number ``after + 1`` to ``last``, and their samples.

        ``last`` must not exceed the newest event, because counts of whole blocks are kept.
        """
        steps = samples = 0
        while after < last:
            block, start = divmod(after, BLOCK_EVENTS)
            stop = min(last, (block + 1) * BLOCK_EVENTS)
            is_whole = start == 0 and stop - after == BLOCK_EVENTS
            with self._lock:
                found = self._blocks.get((job_id, block)) if is_whole else None
            if found is None:
                in_range = (EventRow.kind == "step", EventRow.seq > after, EventRow.seq <= stop)
                found = _steps(session, select(EventRow).where(EventRow.job_id == job_id, *in_range))
            if is_whole:
                with self._lock:
                    self._blocks[job_id, block] = found
                    self._blocks.move_to_end((job_id, block))
                    while len(self._blocks) > _MOST_BLOCKS:
                        self._blocks.popitem(last=False)
            steps, samples, after = steps + found[0], samples + found[1], stop
        return steps, samples

    def of(self, contributor_id: str, *, limit: int = 200) -> WorkRecord:
        """Return the last periods of work of a machine, newest first, and their sums.

        Args:
            contributor_id: id of the machine.
            limit: maximum number of periods to return and to sum up.
        """
        with self._database.read() as session:
            found = list(_periods(session, contributor_id))
            periods = [self._described(session, period) for period in found[-limit:]]
        return WorkRecord(
            periods=tuple(reversed(periods)),
            is_complete=len(found) <= limit,
            seconds=sum(period.seconds for period in periods if period.num_layers is not None),
            steps=sum(period.steps for period in periods),
            microbatches=sum(period.steps * (period.microbatches or 0) for period in periods),
            samples=sum(period.samples for period in periods),
        )

    def busy(self, contributor_id: str, *, since: datetime, points: int = 240) -> list[BusyRecord]:
        """Return the measured utilization of a machine by training jobs, oldest first.

        If there are more than ``points`` measurements, consecutive measurements are averaged.

        Args:
            contributor_id: id of the machine.
            since: only measurements at this time or later.
            points: maximum number of values to return.
        """
        found: list[BusyRecord] = []
        with self._database.read() as session:
            for period in _periods(session, contributor_id):
                ended = period.ended
                if period.data.get("job") is None or (ended is not None and ended.at < since):
                    continue
                measured = _of_job(period, "measured").where(EventRow.at >= since).order_by(EventRow.seq)
                for at, data in session.execute(measured.with_only_columns(EventRow.at, EventRow.data)):
                    busy_s = _busy_s(data, contributor_id, period.data.get("stage"))
                    if busy_s is not None and data["measured_step_s"] > 0:
                        share = min(1.0, busy_s / data["measured_step_s"])
                        found.append(BusyRecord(at=at, busy_fraction=share, job_id=period.data["job"]))
        return list(_thinned(found, points))

    def _described(self, session: Session, period: _Period) -> WorkPeriodRecord:
        data, ended = period.data, period.ended
        steps = samples = 0
        if _trains(data):
            steps, all_samples = _steps(session, _of_job(period, "step"))
            samples = _own_samples(data, all_samples)
        end = ended.at if ended is not None else self._clock()
        return WorkPeriodRecord(
            job_id=data.get("job"),
            deployment_id=data.get("deployment"),
            name=data.get("name") or "",
            start=data.get("start"),
            stop=data.get("stop"),
            num_layers=data.get("num_layers"),
            microbatches=data.get("microbatches"),
            of_microbatches=data.get("of_microbatches"),
            began_at=period.begun.at,
            ended_at=ended.at if ended is not None else None,
            seconds=max(0.0, (end - period.begun.at).total_seconds()),
            steps=steps,
            samples=samples,
        )


def _steps(session: Session, steps: Any) -> tuple[int, int]:
    """Return the number of the ``step`` events that a query finds, and their samples."""
    figures = steps.with_only_columns(func.count(), func.sum(EventRow.data["samples"].as_integer()))
    number, samples = session.execute(figures).one()
    return number, samples or 0


def _begins_work(change: EventRow) -> bool:
    """Return whether a period of work begins with this event, which `changes_work` selects."""
    return change.kind == KIND and bool(change.data.get("job") or change.data.get("deployment"))


def _trains(data: Mapping[str, Any]) -> bool:
    """Return whether the machine computes microbatches of a job in a period with this data."""
    return data.get("job") is not None and bool(data.get("microbatches"))


def _own_samples(data: Mapping[str, Any], samples: int) -> int:
    """Return a machine's share of the samples that all machines processed."""
    if not data.get("microbatches"):
        return 0
    own: float = samples * data["microbatches"] / data["of_microbatches"]
    return round(own)


def _of_job(period: _Period, kind: str) -> Any:
    """Return a query for the events of this kind that the period's job wrote during the period."""
    query = select(EventRow).where(
        EventRow.job_id == period.data["job"], EventRow.seq > period.begun.seq, EventRow.kind == kind
    )
    return query if period.ended is None else query.where(EventRow.seq < period.ended.seq)


def _periods(session: Session, contributor_id: str) -> Iterator[_Period]:
    """Yield the periods of work of a machine, oldest first."""
    query = select(EventRow).where(EventRow.contributor_id == contributor_id, changes_work())
    current: _Period | None = None
    for event in session.scalars(query.order_by(EventRow.seq)):
        if current is not None:
            current.ended = event
            yield current
            current = None
        if _begins_work(event):
            current = _Period(event.data, event)
    if current is not None:
        yield current


def _busy_s(data: Mapping[str, Any], contributor_id: str, stage: int | None) -> float | None:
    """Return the time in seconds for which a machine computed in a step; None if it is unknown.

    Events of older releases have only the time of the busiest machine of each stage; then this time is returned.
    """
    machines: dict[str, float] = data.get("machines") or {}
    if machines or stage is None:
        return machines.get(contributor_id)
    stages = data["stages"]
    return float(stages[stage]["measured_busy_s"]) if stage < len(stages) else None


def changes_work() -> ColumnElement[bool]:
    """Return the SQL condition for ``work`` events, and for events about machines that left or were lost."""
    goes = and_(EventRow.kind == "contributor", EventRow.data["state"].as_string().in_(GONE))
    return or_(EventRow.kind == KIND, goes)


def _thinned(found: list[BusyRecord], points: int) -> Iterable[BusyRecord]:
    size = -(-len(found) // points) if found else 1
    for place in range(0, len(found), size):
        some = found[place : place + size]
        mean = sum(one.busy_fraction for one in some) / len(some)
        yield some[-1].model_copy(update={"busy_fraction": mean})


def lease_changes(
    session: Session, holder: Mapping[str, Any], leased: Collection[str], plan: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Return {contributor id: data of its new ``work`` event} for the leased machines whose work has changed.

    Args:
        session: session of the transaction.
        holder: id of the holder under the key ``job`` or ``deployment``, and its name under ``name``.
        leased: ids of the machines leased to the holder.
        plan: part of each machine, as `parts` returns it; None before the plan is made.
    """
    held = plan or {}
    new = {machine: {**FREE, **holder, **held.get(machine, {})} for machine in leased}
    last = (
        select(func.max(EventRow.seq))
        .where(EventRow.contributor_id.in_(leased), changes_work())
        .group_by(EventRow.contributor_id)
    )
    rows = session.execute(select(EventRow.contributor_id, EventRow.data).where(EventRow.seq.in_(last)))
    before = {machine: data for machine, data in rows if machine is not None}
    return {machine: data for machine, data in new.items() if before.get(machine) != data}


def record_deployment_work(session: Session, row: DeploymentRow, now: datetime) -> None:
    """Write ``work`` events for a deployment's machines that are newly leased or hold another part of the model."""
    leased = session.scalars(select(ContributorRow.id).where(ContributorRow.deployment_id == row.id)).all()
    holder = {"deployment": row.id, "name": row.name}
    record_work(session, now, lease_changes(session, holder, leased, parts(*row.plans)))
