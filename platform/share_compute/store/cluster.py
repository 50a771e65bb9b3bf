"""Reads summaries of machines for maps, tables and agents, and the links that machines measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic_core import from_json
from sqlalchemy import Text, case, cast, func, or_, select
from sqlalchemy.orm import Session, aliased

from share_compute.device_kinds import KINDS
from share_compute.lifecycle.states import ContributorState
from share_compute.store.contributors import REMEMBERED, here_since, wrong_key
from share_compute.store.database.database import Database
from share_compute.store.database.tables import ContributorRow, DeploymentRow, EventRow, InviteRow, JobRow
from share_compute.store.heartbeats import Heartbeats
from share_compute.store.records import (
    AT_START,
    THIS_MACHINE,
    AgentRecord,
    HeldRecord,
    MachineSummaryRecord,
)
from share_compute.store.secret import matches
from share_compute.store.work import KIND, parts
from share_compute.topology import BASE_DTYPE, HEAD, Contributor, Device

_CAPACITY = cast(ContributorRow.capacity, Text).label("capacity")
_LINKS = cast(ContributorRow.links, Text).label("links")
_COLUMNS = (
    ContributorRow.id,
    ContributorRow.name,
    ContributorRow.state,
    ContributorRow.reason,
    ContributorRow.host,
    ContributorRow.limits,
    _CAPACITY,
    _LINKS,
    ContributorRow.job_id,
    ContributorRow.deployment_id,
    ContributorRow.joined_at,
    ContributorRow.last_seen_at,
    ContributorRow.left_at,
)
_WORK = (
    select(EventRow.data)
    .where(EventRow.contributor_id == ContributorRow.id, EventRow.kind == KIND)
    .order_by(EventRow.seq.desc())
    .limit(1)
    .scalar_subquery()
)
"""The machine's last ``work`` event. It names the part of a leased machine, whose whole plan can be large."""
_NO_OWNER = (None, "", AT_START, THIS_MACHINE)
"""Labels of invites that name no owner."""
_IS_LEASED = or_(ContributorRow.job_id.is_not(None), ContributorRow.deployment_id.is_not(None))
_AGENT = select(
    ContributorRow.id,
    ContributorRow.key_hash,
    ContributorRow.state,
    ContributorRow.reason,
    _CAPACITY,
    _LINKS,
    JobRow.tokens_per_s,
    case((_IS_LEASED, _WORK)).label("work"),
).outerjoin(JobRow, JobRow.id == ContributorRow.job_id)


class ClusterRows:
    """Reader of machine summaries and of measured links.

    Args:
        database: the database with the machines.
        clock: function that returns the current time in UTC.
        heartbeats: times of the machines' last heartbeats.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime], heartbeats: Heartbeats) -> None:
        self._database = database
        self._clock = clock
        self._heartbeats = heartbeats

    def agent(self, contributor_id: str, key: str) -> AgentRecord:
        """Return the data that a machine's agent shows, by one query, if the key belongs to the machine.

        Raises:
            NotAuthorized: the key belongs to another contributor, or to none.
        """
        with self._database.read() as session:
            row = session.execute(_AGENT.where(ContributorRow.id == contributor_id)).one_or_none()
        if row is None or not matches(key, row.key_hash):
            raise wrong_key()
        measured = _measured(row.capacity, row.links)
        has_link = bool(measured.head_bytes_per_s)  # a dead link carries no bytes
        return AgentRecord(
            id=row.id,
            state=ContributorState(row.state),
            reason=row.reason,
            held=None if row.work is None else _held_by_event(row.work),
            tokens_per_s=row.tokens_per_s,
            flops_per_s=measured.device_flops_per_s,
            head_latency_s=measured.head_latency_s if has_link else None,
            head_bytes_per_s=measured.head_bytes_per_s if has_link else None,
        )

    def summaries(self, contributor_ids: Collection[str] | None = None) -> list[MachineSummaryRecord]:
        """Return summaries of the given machines, in the order they joined.

        Without ids, return those of the machines that are present or left in the last day (see `here_since`).
        """
        query = select(*_COLUMNS).order_by(ContributorRow.joined_at, ContributorRow.id)
        if contributor_ids is not None:
            query = query.where(ContributorRow.id.in_(contributor_ids))
        else:
            query = query.where(here_since(self._clock() - REMEMBERED))
        with self._database.read() as session:
            rows = session.execute(query).all()
            owners = _owners(session, contributor_ids)
            held = _held(session, rows)
            return [
                _summary(
                    row,
                    owners.get(row.id),
                    held.get(row.id),
                    self._heartbeats.latest(row.id, row.last_seen_at),
                )
                for row in rows
            ]

    def links(self, states: Collection[ContributorState]) -> list[tuple[str, str | None, Any]]:
        """Return (id, address, links) of measured machines in these states, in the order they joined."""
        query = select(ContributorRow.id, ContributorRow.address, ContributorRow.links)
        query = query.where(
            ContributorRow.state.in_([state.value for state in states]), ContributorRow.capacity.is_not(None)
        )
        with self._database.read() as session:
            rows = session.execute(query.order_by(ContributorRow.joined_at, ContributorRow.id))
            return [(row.id, row.address, row.links) for row in rows]


def _owners(session: Session, contributor_ids: Collection[str] | None) -> dict[str, str]:
    """Return {contributor id: label of its invite}, only for contributors whose invite has a label from a person.

    A sibling has the invite of the contributor that ``sibling_of`` names.
    """
    first = aliased(ContributorRow)
    query = select(ContributorRow.id, InviteRow.label)
    query = query.join(first, first.id == func.coalesce(ContributorRow.sibling_of, ContributorRow.id))
    query = query.join(InviteRow, InviteRow.id == first.invite_id)
    if contributor_ids is not None:
        query = query.where(ContributorRow.id.in_(contributor_ids))
    return {machine: label for machine, label in session.execute(query) if label not in _NO_OWNER}


def _held(session: Session, rows: Iterable[Any]) -> dict[str, HeldRecord]:
    """Return the job or deployment of each leased machine and its planned part of the model, by contributor id."""
    jobs = {row.id: row.job_id for row in rows if row.job_id}
    deployments = {row.id: row.deployment_id for row in rows if row.deployment_id}
    held: dict[str, HeldRecord] = {}
    if jobs:
        planned = select(JobRow.id, JobRow.name, JobRow.plan).where(JobRow.id.in_(set(jobs.values())))
        found = {row.id: (row.name, parts(row.plan) if row.plan else {}) for row in session.execute(planned)}
        for machine, job in jobs.items():
            name, part = found.get(job, ("", {}))
            held[machine] = HeldRecord(job_id=job, name=name, **part.get(machine, {}))
    if deployments:
        placed = select(DeploymentRow.id, DeploymentRow.name, DeploymentRow.plans).where(
            DeploymentRow.id.in_(set(deployments.values()))
        )
        laid = {row.id: (row.name, parts(*row.plans)) for row in session.execute(placed)}
        for machine, deployment in deployments.items():
            name, part = laid.get(deployment, ("", {}))
            held[machine] = HeldRecord(deployment_id=deployment, name=name, **part.get(machine, {}))
    return held


def _held_by_event(data: Mapping[str, Any]) -> HeldRecord:
    """Return the job or deployment that a ``work`` event names, and the machine's part of the model."""
    part = {"name": ""} | {name: data[name] for name in HeldRecord.model_fields if name in data}
    return HeldRecord(job_id=data.get("job"), deployment_id=data.get("deployment"), **part)


class _Measured(NamedTuple):
    """Summary of the measurements of one machine."""

    kind: str | None
    device: str | None
    flops_per_s: float
    device_flops_per_s: float | None
    """Speed of the device that a member computes on; None until the machine was measured."""
    memory_bytes: int
    head_latency_s: float | None
    head_bytes_per_s: float | None


@lru_cache(maxsize=4096)
def _measured(capacity: str | None, links: str | None) -> _Measured:
    """Summarize a machine's measured capacity and links, given as JSON text.

    The result is cached, because parsing the JSON text of many machines is slow.
    """
    devices: list[dict[str, Any]] = from_json(capacity or "null") or []
    among: list[dict[str, Any]] = from_json(links or "null") or []
    head = next((link for link in among if HEAD in (link["source"], link["target"])), None)
    machine = Contributor("", "", tuple(Device(**device) for device in devices))
    return _Measured(
        kind=max((device["kind"] for device in devices), key=lambda kind: KINDS[kind].is_gpu, default=None),
        device=", ".join(device["name"] for device in devices) or None,
        flops_per_s=_rounded(sum(device["flops_per_s"].get(BASE_DTYPE, 0.0) for device in devices)),
        device_flops_per_s=_rounded(machine.whole.flops_per_s()) if devices else None,
        memory_bytes=sum(device["memory_bytes"] for device in devices),
        head_latency_s=_rounded(head["latency_s"]) if head else None,
        head_bytes_per_s=_rounded(head["bytes_per_s"]) if head else None,
    )


def _summary(
    row: Any, owner: str | None, held: HeldRecord | None, last_seen_at: datetime
) -> MachineSummaryRecord:
    measured = _measured(row.capacity, row.links)
    return MachineSummaryRecord(
        id=row.id,
        name=row.name,
        owner=owner,
        host=row.host,
        state=ContributorState(row.state),
        reason=row.reason,
        kind=measured.kind,
        device=measured.device,
        flops_per_s=measured.flops_per_s,
        lent_bytes=measured.memory_bytes or int(row.limits.get("memory_bytes") or 0),
        head_latency_s=measured.head_latency_s,
        head_bytes_per_s=measured.head_bytes_per_s,
        held=held,
        joined_at=row.joined_at,
        last_seen_at=last_seen_at,
        left_at=row.left_at,
    )


def _rounded(measured: float) -> float:
    """Round a measurement to four significant digits, because more would only make the response longer."""
    return float(f"{measured:.4g}")
