"""The tables as typed SQLAlchemy models. A change needs a migration; a test compares models and migrations."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
Serial = BigInteger().with_variant(Integer, "sqlite")
"""Type of automatically numbered columns: SQLite numbers only columns of the exact type INTEGER."""


class UtcDateTime(TypeDecorator[datetime]):
    """Time in UTC. SQLite stores no time zone: it is removed when writing and added when reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the value to store; refuse times without a time zone, whose meaning would depend on the machine."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a datetime needs a time zone")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the stored time in UTC."""
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Base of all tables. It names every constraint, because a migration can only change constraints with names."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime, dict[str, Any]: Json, list[Any]: Json, str: Text}  # noqa: RUF012


class ServerEpochRow(Base):
    """Fencing token: one row that names the server that may write. Each write transaction locks the row."""

    __tablename__ = "server_epoch"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(BigInteger)
    holder: Mapped[str]
    claimed_at: Mapped[datetime | None]


class RemovalRow(Base):
    """A folder that is still to be removed; the rows that referred to it are already deleted."""

    __tablename__ = "removals"
    path: Mapped[str] = mapped_column(primary_key=True)
    asked_at: Mapped[datetime]


class ApiKeyRow(Base):
    """An API key of the REST API."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    key_hash: Mapped[str] = mapped_column(unique=True)
    scopes: Mapped[list[Any]] = mapped_column(server_default="[]")
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class InviteRow(Base):
    """A code that lets machines join."""

    __tablename__ = "invites"
    id: Mapped[str] = mapped_column(primary_key=True)
    code_hash: Mapped[str] = mapped_column(unique=True)
    label: Mapped[str | None]
    uses: Mapped[int] = mapped_column(server_default="1")
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class JobRow(Base):
    """A job: its specification and its progress."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str | None]
    name: Mapped[str]
    kind: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str]
    spec: Mapped[dict[str, Any]]
    plan: Mapped[dict[str, Any] | None]
    measured: Mapped[dict[str, Any] | None]
    proposal: Mapped[dict[str, Any] | None]
    is_protected: Mapped[bool] = mapped_column(server_default=false())
    computation: Mapped[str | None]
    timings: Mapped[dict[str, Any] | None] = mapped_column(deferred=True)
    error: Mapped[dict[str, Any] | None]
    attempt: Mapped[int]
    fruitless_attempts: Mapped[int] = mapped_column(server_default="0")
    step: Mapped[int]
    total_steps: Mapped[int]
    loss: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    rows: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    delete_requested_at: Mapped[datetime | None]
    checkpoint_path: Mapped[str | None]
    checkpoint_step: Mapped[int | None]
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    pictures: Mapped[dict[str, Any] | None] = mapped_column(deferred=True)
    tags: Mapped[list[Any]] = mapped_column(server_default="[]")
    group: Mapped[str | None] = mapped_column(index=True)
    note: Mapped[str] = mapped_column(server_default="")
    links: Mapped[list[Any]] = mapped_column(server_default="[]")
    has_waiting_links: Mapped[bool] = mapped_column(server_default=false(), index=True)
    deployment_id: Mapped[str | None]
    sweep_id: Mapped[str | None] = mapped_column(index=True)
    trial: Mapped[dict[str, Any] | None]
    sweep_progress: Mapped[dict[str, Any] | None] = mapped_column(deferred=True)
    due_reports: Mapped[list[Any]] = mapped_column(server_default="[]")
    has_due_reports: Mapped[bool] = mapped_column(server_default=false(), index=True)
    __table_args__ = (Index("ix_jobs_created_at_id", "created_at", "id"),)


class DeploymentRow(Base):
    """A model that is or was served. A name is unique among live deployments."""

    __tablename__ = "deployments"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str | None]
    name: Mapped[str] = mapped_column(index=True)
    state: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str]
    spec: Mapped[dict[str, Any]]
    plans: Mapped[list[Any]]
    computation: Mapped[dict[str, Any] | None]
    error: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime]
    ready_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    __table_args__ = (Index("ix_deployments_created_at_id", "created_at", "id"),)


class ContributorRow(Base):
    """A machine that joined."""

    __tablename__ = "contributors"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    key_hash: Mapped[str] = mapped_column(unique=True)
    state: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str]
    host: Mapped[str]
    node_id: Mapped[str | None]
    address: Mapped[str | None]
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), index=True)
    deployment_id: Mapped[str | None] = mapped_column(index=True)
    versions: Mapped[dict[str, Any]]
    limits: Mapped[dict[str, Any]]
    capacity: Mapped[list[Any] | None]
    links: Mapped[list[Any] | None]
    threads: Mapped[int | None]
    measured_at: Mapped[datetime | None]
    joined_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    left_at: Mapped[datetime | None]
    removed_at: Mapped[datetime | None]
    offences: Mapped[int] = mapped_column(default=0, server_default="0")
    quarantined_for: Mapped[str | None]
    sibling_of: Mapped[str | None] = mapped_column(index=True)
    invite_id: Mapped[str | None] = mapped_column(index=True)


class EventRow(Base):
    """An event; numbers (``seq``) follow the order of commits."""

    __tablename__ = "events"
    seq: Mapped[int] = mapped_column(Serial, primary_key=True, autoincrement=True)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    contributor_id: Mapped[str | None] = mapped_column(ForeignKey("contributors.id"))
    attempt: Mapped[int | None]
    kind: Mapped[str]
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]]
    __table_args__ = (
        Index("ix_events_job_id_seq", "job_id", "seq"),
        Index("ix_events_contributor_id_seq", "contributor_id", "seq"),
        {"sqlite_autoincrement": True},
    )


class MetricRow(Base):
    """Metrics of one step of a job on one split of its data. An attempt overwrites the steps that it repeats."""

    __tablename__ = "metrics"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    split: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    data: Mapped[dict[str, Any]]


class ArtifactRow(Base):
    """A finished result of a job."""

    __tablename__ = "artifacts"
    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    name: Mapped[str]
    path: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    __table_args__ = (UniqueConstraint("job_id", "name"),)


class StreamRow(Base):
    """A resumable stream of the OpenAI API. Expiry removes the request and the prompts, and deletes the parts."""

    __tablename__ = "streams"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    deployment_id: Mapped[str]
    model: Mapped[str]
    kind: Mapped[str]
    request: Mapped[dict[str, Any] | None]
    prompts: Mapped[list[Any] | None]
    answer_id: Mapped[str]
    created: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)
    is_over: Mapped[bool]
    stored_at: Mapped[datetime]
    read_at: Mapped[datetime]
    expired_at: Mapped[datetime | None] = mapped_column(index=True)


class StreamPartRow(Base):
    """Events of a resumable stream, in the order of ``number``."""

    __tablename__ = "stream_parts"
    stream_id: Mapped[str] = mapped_column(ForeignKey("streams.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    events: Mapped[list[Any]]
