"""Deployment rows: models that are served. Every state change checks the state machine and writes an event."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from share_compute.errors import Conflict, NotFound
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import LIVE, DeploymentState, check_change
from share_compute.lifecycle.deployment_status import Interruption
from share_compute.planning.plan import Plan
from share_compute.specification import ReplicasSpec, ServeJob
from share_compute.store.database.cursors import read_cursor, write_cursor
from share_compute.store.database.database import Database
from share_compute.store.database.tables import DeploymentRow
from share_compute.store.events import DEPLOYMENT, add_event
from share_compute.store.records import DeploymentRecord
from share_compute.store.secret import new_id
from share_compute.store.suggestions import suggested_deployment
from share_compute.store.work import record_deployment_work

_LIVE = [state.value for state in LIVE]


class Deployments:
    """The table of deployments."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def create(self, spec: ServeJob, *, reason: str, owner: str | None = None) -> DeploymentRecord:
        """Create a pending deployment.

        Write transactions are serialized: if two concurrent calls use the same name, at most one succeeds.

        Args:
            spec: the requested deployment.
            reason: the condition that the deployment waits for, shown to users.
            owner: id of the API key that owns the deployment; None if only admins may change it.

        Raises:
            Conflict: a live deployment has this name.
        """
        now = self._clock()
        with self._database.write() as session:
            return DeploymentRecord.model_validate(add_deployment(session, spec, reason, owner, now))

    def get(self, key: str) -> DeploymentRecord:
        """Return the deployment with this id, else the live one with this name, else the newest one with this name.

        Raises:
            NotFound: no deployment has this id or name.
        """
        with self._database.read() as session:
            return DeploymentRecord.model_validate(deployment_row(session, key))

    def by_name(self, name: str) -> DeploymentRecord | None:
        """Return the live deployment with this name, or None."""
        with self._database.read() as session:
            row = _up(session, name)
            return None if row is None else DeploymentRecord.model_validate(row)

    def page(
        self,
        *,
        states: Collection[DeploymentState] = LIVE,
        limit: int = 50,
        cursor: str | None = None,
    ) -> tuple[list[DeploymentRecord], str | None]:
        """Return a page of deployments, newest first, and the cursor of the next page if there is one.

        Args:
            states: states to include; default: the live ones.
            limit: maximum number of deployments to return.
            cursor: cursor that came with the previous page; None for the first page.
        """
        wanted = DeploymentRow.state.in_([state.value for state in states])
        query = select(DeploymentRow).where(wanted).limit(limit + 1)
        query = query.order_by(DeploymentRow.created_at.desc(), DeploymentRow.id.desc())
        if cursor is not None:
            query = query.where(
                tuple_(DeploymentRow.created_at, DeploymentRow.id) < tuple_(*read_cursor(cursor))
            )
        with self._database.read() as session:
            found = [DeploymentRecord.model_validate(row) for row in session.scalars(query)]
        page = found[:limit]
        return page, write_cursor(page[-1].created_at, page[-1].id) if len(found) > limit else None

    def failed_since(self, moment: datetime) -> list[DeploymentRecord]:
        """Return the deployments that failed at ``moment`` or later, newest failure first."""
        query = (
            select(DeploymentRow)
            .where(DeploymentRow.state == DeploymentState.failed.value, DeploymentRow.ended_at >= moment)
            .order_by(DeploymentRow.ended_at.desc(), DeploymentRow.id)
        )
        with self._database.read() as session:
            return [DeploymentRecord.model_validate(row) for row in session.scalars(query)]

    def set_state(
        self,
        deployment_id: str,
        state: DeploymentState,
        reason: str,
        *,
        plans: Sequence[Plan] | None = None,
        error: dict[str, Any] | None = None,
    ) -> DeploymentRecord:
        """Change a deployment's state, or only its reason or plans. A call that changes nothing writes no event.

        Args:
            deployment_id: id of the deployment.
            state: the new state.
            reason: cause of the state, shown to users.
            plans: one plan for each placed replica; None keeps the stored plans.
            error: code and facts of the failure, if the new state is ``failed``.

        Raises:
            NotFound: no deployment has this id.
            Conflict: the state machine forbids the change, e.g. because the deployment was taken down meanwhile.
        """
        now = self._clock()
        laid = None if plans is None else [plan.model_dump(mode="json") for plan in plans]
        with self._database.write() as session:
            row = deployment_row(session, deployment_id)
            is_news = row.state != state or row.reason != reason or laid not in (None, row.plans)
            if row.state != state or state.is_final:
                check_change(row.name, DeploymentState(row.state), state)
            if is_news:
                _move(session, row, state, reason, now, error=error)
                if laid is not None:
                    row.plans = laid
                    record_deployment_work(session, row, now)
            return DeploymentRecord.model_validate(row)

    def set_replicas(self, key: str, change: ReplicasSpec) -> DeploymentRecord:
        """Change the requested number or range of replicas of a deployment.

        Args:
            key: id or name of the deployment.
            change: the new values; fields that are not set keep their values.

        Raises:
            NotFound: no deployment has this id or name.
            Conflict: the deployment has stopped or failed.
            UserError: the new values contradict the values that are kept.
        """
        with self._database.write() as session:
            row = deployment_row(session, key)
            if DeploymentState(row.state).is_final:
                raise Conflict(
                    f"deployment {row.name} is {row.state}; it has no replicas any more",
                    hint="deploy it again; this one is over",
                )
            spec = ServeJob.model_validate(row.spec)
            replicas = spec.replicas.changed_by(change)
            if spec.replicas != replicas:
                row.spec = spec.model_copy(update={"replicas": replicas}).model_dump(mode="json")
                news = {"asked": str(replicas), "asked_before": str(spec.replicas)}
                _record_event(session, row, row.state, self._clock(), replicas=news)
            return DeploymentRecord.model_validate(row)

    def scaled(self, deployment_id: str, before: int, wanted: int, reason: str) -> None:
        """Record in an event that the autoscaler changed the number of replicas from ``before`` to ``wanted``.

        Raises:
            NotFound: no deployment has this id.
        """
        with self._database.write() as session:
            row = deployment_row(session, deployment_id)
            replicas = {"wanted": wanted, "wanted_before": before}
            _record_event(session, row, row.state, self._clock(), reason=reason, replicas=replicas)

    def choose_computation(self, deployment_id: str, computation: Computation) -> DeploymentRecord:
        """Store whether a deployment computes with compiled or with eager code, unless a choice is stored already.

        Raises:
            NotFound: no deployment has this id.
        """
        with self._database.write() as session:
            row = deployment_row(session, deployment_id)
            if row.computation is None:
                row.computation = computation.model_dump(mode="json")
                facts = {"computation": row.computation}
                _record_event(session, row, row.state, self._clock(), **facts)
            return DeploymentRecord.model_validate(row)

    def interrupted(self, deployment_id: str, replica: int, interruption: Interruption) -> None:
        """Record in an event that a replica was interrupted.

        Args:
            deployment_id: id of the deployment.
            replica: number of the replica.
            interruption: the interruption that the replica's server reported.

        Raises:
            NotFound: no deployment has this id.
        """
        facts = {"replica": replica, **interruption.model_dump(mode="json", exclude={"seconds"})}
        with self._database.write() as session:
            row = deployment_row(session, deployment_id)
            facts["of"] = max(1, len(row.plans))
            _record_event(session, row, row.state, self._clock(), interrupted=facts)

    def went_on(self, deployment_id: str, replica: int, interruption: Interruption) -> None:
        """Record in an event that a replica resumed after an interruption.

        Args:
            deployment_id: id of the deployment.
            replica: number of the replica.
            interruption: the interruption that the replica's server reported.

        Raises:
            NotFound: no deployment has this id.
        """
        facts = {"replica": replica, **interruption.model_dump(mode="json", exclude={"reason", "machines"})}
        with self._database.write() as session:
            row = deployment_row(session, deployment_id)
            _record_event(session, row, row.state, self._clock(), went_on=facts)

    def stop(self, key: str, reason: str = "taken down") -> DeploymentRecord:
        """Take a deployment down, given its id or its name. A second call changes nothing.

        Another deployment can use the name at once.

        Raises:
            NotFound: no deployment has this id or name.
        """
        with self._database.write() as session:
            row = deployment_row(session, key)
            if not DeploymentState(row.state).is_final:
                _move(session, row, DeploymentState.stopped, reason, self._clock())
            return DeploymentRecord.model_validate(row)

    def list(self, states: Collection[DeploymentState] = LIVE) -> list[DeploymentRecord]:
        """Return the deployments in these states, oldest first; default: the live ones."""
        wanted = DeploymentRow.state.in_([state.value for state in states])
        query = select(DeploymentRow).where(wanted).order_by(DeploymentRow.created_at, DeploymentRow.id)
        with self._database.read() as session:
            return [DeploymentRecord.model_validate(row) for row in session.scalars(query)]


def _up(session: Session, name: str) -> DeploymentRow | None:
    return session.scalar(
        select(DeploymentRow).where(DeploymentRow.name == name, DeploymentRow.state.in_(_LIVE))
    )


def add_deployment(
    session: Session, spec: ServeJob, reason: str, owner: str | None, now: datetime
) -> DeploymentRow:
    """Create a pending deployment, in the caller's transaction; see `Deployments.create`.

    Raises:
        Conflict: a live deployment has this name.
    """
    twin = _up(session, spec.name)
    if twin is not None:
        raise Conflict(
            f"a deployment named {spec.name} is up already ({twin.id}, {twin.state})",
            hint=f"choose another name, or take it down first: share-compute undeploy {spec.name}",
        )
    row = DeploymentRow(
        id=new_id("dep"),
        owner=owner,
        name=spec.name,
        state=DeploymentState.pending.value,
        reason=reason,
        spec=spec.model_dump(mode="json"),
        plans=[],
        created_at=now,
    )
    session.add(row)
    session.flush()
    _record_event(session, row, None, now)
    return row


def deployment_row(session: Session, key: str) -> DeploymentRow:
    """Return the row with this id, else the live or newest row with this name; raise NotFound if there is none."""
    named = select(DeploymentRow).where(DeploymentRow.name == key).order_by(DeploymentRow.created_at.desc())
    row = session.get(DeploymentRow, key) or _up(session, key) or session.scalar(named.limit(1))
    if row is None:
        text = f"there is no deployment {key}{suggested_deployment(session, key)}"
        raise NotFound(text, hint="share-compute deployments lists them")
    return row


def _move(
    session: Session,
    row: DeploymentRow,
    state: DeploymentState,
    reason: str,
    now: datetime,
    *,
    error: dict[str, Any] | None = None,
) -> None:
    before = row.state
    row.state, row.reason = state.value, reason
    row.error = error if state is DeploymentState.failed else None
    if state is DeploymentState.ready and row.ready_at is None:
        row.ready_at = now
    if state.is_final:
        row.ended_at = now
    _record_event(session, row, before, now)


def _record_event(
    session: Session, row: DeploymentRow, before: str | None, now: datetime, **more: Any
) -> None:
    data = {"id": row.id, "name": row.name, "state": row.state, "from": before, "reason": row.reason, **more}
    add_event(session, DEPLOYMENT, now, data | ({"error": row.error} if row.error else {}))
