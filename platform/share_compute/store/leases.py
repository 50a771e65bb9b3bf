"""Leases: which machines each deployment holds. A machine is for one job or one deployment at a time."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select, update

from share_compute.jobs.states import ContributorState
from share_compute.store.database import Database
from share_compute.store.records import ContributorRecord
from share_compute.store.tables import Contributor


class Leases:
    """The machines of deployments."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, deployment_id: str, contributor_ids: Collection[str]) -> list[ContributorRecord]:
        """Let a deployment hold those of these machines that are ready and that nobody holds; return what it holds."""
        wanted = (
            Contributor.id.in_(contributor_ids),
            Contributor.state == ContributorState.ready.value,
            Contributor.job_id.is_(None),
            Contributor.deployment_id.is_(None),
        )
        with self._database.write() as session:
            session.execute(update(Contributor).where(*wanted).values(deployment_id=deployment_id))
            query = select(Contributor).where(Contributor.deployment_id == deployment_id)
            rows = session.scalars(query.order_by(Contributor.joined_at, Contributor.id))
            return [ContributorRecord.model_validate(row) for row in rows]

    def release(self, deployment_id: str, contributor_ids: Collection[str]) -> None:
        """Let a deployment hold these machines no more."""
        held = (Contributor.deployment_id == deployment_id) & Contributor.id.in_(contributor_ids)
        with self._database.write() as session:
            session.execute(update(Contributor).where(held).values(deployment_id=None))

    def release_all(self, deployment_id: str | None = None) -> None:
        """Let a deployment hold no machine any more; without its id, none at all."""
        free = update(Contributor).values(deployment_id=None)
        if deployment_id is not None:
            free = free.where(Contributor.deployment_id == deployment_id)
        with self._database.write() as session:
            session.execute(free)
