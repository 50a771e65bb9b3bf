"""Leases of machines to deployments. A machine is leased to at most one job or deployment at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime

from sqlalchemy import ColumnElement, select, update

from share_compute.lifecycle.states import ContributorState
from share_compute.store.database.database import Database
from share_compute.store.database.tables import ContributorRow, DeploymentRow
from share_compute.store.heartbeats import Heartbeats
from share_compute.store.records import ContributorRecord
from share_compute.store.work import record_deployment_work, record_free


class Leases:
    """Leases machines to deployments, and releases them."""

    def __init__(self, database: Database, clock: Callable[[], datetime], heartbeats: Heartbeats) -> None:
        self._database = database
        self._clock = clock
        self._heartbeats = heartbeats

    def take(self, deployment_id: str, contributor_ids: Collection[str]) -> list[ContributorRecord]:
        """Lease the given machines that are ready and free to a deployment; return all machines leased to it."""
        wanted = (
            ContributorRow.id.in_(contributor_ids),
            ContributorRow.state == ContributorState.ready.value,
            ContributorRow.job_id.is_(None),
            ContributorRow.deployment_id.is_(None),
        )
        with self._database.write() as session:
            session.execute(update(ContributorRow).where(*wanted).values(deployment_id=deployment_id))
            query = select(ContributorRow).where(ContributorRow.deployment_id == deployment_id)
            rows = session.scalars(query.order_by(ContributorRow.joined_at, ContributorRow.id)).all()
            deployment = session.get(DeploymentRow, deployment_id)
            if deployment is not None:
                record_deployment_work(session, deployment, self._clock())
            return [self._heartbeats.updated(ContributorRecord.model_validate(row)) for row in rows]

    def release(self, deployment_id: str, contributor_ids: Collection[str]) -> None:
        """Release the given machines of a deployment."""
        self._release(
            (ContributorRow.deployment_id == deployment_id) & ContributorRow.id.in_(contributor_ids)
        )

    def release_all(self, deployment_id: str) -> None:
        """Release all machines of a deployment."""
        self._release(ContributorRow.deployment_id == deployment_id)

    def keep_only(self, deployment_ids: Collection[str]) -> None:
        """Release the machines of all deployments except the given ones."""
        is_held = ContributorRow.deployment_id.is_not(None)
        self._release(is_held & ContributorRow.deployment_id.not_in(deployment_ids))

    def _release(self, held: ColumnElement[bool]) -> None:
        with self._database.write() as session:
            record_free(session, self._clock(), held)
            session.execute(update(ContributorRow).where(held).values(deployment_id=None))
