"""History of the machines' work, read from events as periods of work.

Each change of a machine's work is an event of kind ``work``. The event names the job or the deployment that the machine
is leased to, and the part of the model that the machine holds. The part is missing before the plan is made. Job and
deployment are both null when the machine becomes free. When a machine leaves or is lost, its work ends with its
``contributor`` event, without a ``work`` event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, func, insert, or_, select
from sqlalchemy.orm import Session

from share_compute.lifecycle.states import GONE
from share_compute.store.database.database import HAS_EVENTS, Database
from share_compute.store.database.tables import ContributorRow, DeploymentRow, EventRow
from share_compute.store.records import BusyRecord, WorkPeriodRecord, WorkRecord

KIND = "work"
FREE: dict[str, Any] = {"job": None, "deployment": None}
"""Data of the ``work`` event of a machine that has become free."""


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
                        # The tokens of a step event are those of all branches.
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


class WorkHistory:
    """History of the machines' work, read from events.

    Args:
        database: the database with the events.
        clock: function that returns the current time in UTC.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

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
            tokens=sum(period.tokens for period in periods),
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
        steps = tokens = 0
        if data.get("job") is not None and data.get("microbatches"):
            figures = _of_job(period, "step").with_only_columns(
                func.count(), func.sum(EventRow.data["tokens"].as_integer())
            )
            steps, all_tokens = session.execute(figures).one()
            tokens = round((all_tokens or 0) * data["microbatches"] / data["of_microbatches"])
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
            tokens=tokens,
        )


def _of_job(period: _Period, kind: str) -> Any:
    """Return a query for the events of this kind that the period's job wrote in the period."""
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
        if event.kind == KIND and (event.data.get("job") or event.data.get("deployment")):
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
    """Return the SQL condition for ``work`` events, and for events that say that a machine left or was lost."""
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
