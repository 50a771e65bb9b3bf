"""Create the first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Column types are repeated here, not imported from `tables`: later changes there must not change this migration.
_Json = sa.JSON().with_variant(JSONB(), "postgresql")
_Moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.Text(), nullable=False),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("revoked_at", _Moment, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("spec", _Json, nullable=False),
        sa.Column("plan", _Json, nullable=True),
        sa.Column("error", _Json, nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("tokens_per_s", sa.Double(), nullable=True),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("started_at", _Moment, nullable=True),
        sa.Column("finished_at", _Moment, nullable=True),
        sa.Column("cancel_requested_at", _Moment, nullable=True),
        sa.Column("checkpoint_path", sa.Text(), nullable=True),
        sa.Column("checkpoint_step", sa.Integer(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
    )
    op.create_index(op.f("ix_jobs_created_at_id"), "jobs", ["created_at", "id"], unique=False)
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"], unique=False)

    op.create_table(
        "artifacts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", _Moment, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_artifacts_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifacts")),
        sa.UniqueConstraint("job_id", "name", name=op.f("uq_artifacts_job_id")),
    )
    op.create_table(
        "contributors",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=True),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("versions", _Json, nullable=False),
        sa.Column("limits", _Json, nullable=False),
        sa.Column("capacity", _Json, nullable=True),
        sa.Column("links", _Json, nullable=True),
        sa.Column("joined_at", _Moment, nullable=False),
        sa.Column("last_seen_at", _Moment, nullable=False),
        sa.Column("left_at", _Moment, nullable=True),
        sa.Column("sent_away_at", _Moment, nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_contributors_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_contributors")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_contributors_key_hash")),
    )
    op.create_index(op.f("ix_contributors_job_id"), "contributors", ["job_id"], unique=False)
    op.create_index(op.f("ix_contributors_name"), "contributors", ["name"], unique=False)
    op.create_index(op.f("ix_contributors_state"), "contributors", ["state"], unique=False)

    op.create_table(
        "metrics",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("data", _Json, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_metrics_job_id")),
        sa.PrimaryKeyConstraint("job_id", "split", "step", name=op.f("pk_metrics")),
    )
    op.create_table(
        "events",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("contributor_id", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", _Moment, nullable=False),
        sa.Column("data", _Json, nullable=False),
        sa.ForeignKeyConstraint(
            ["contributor_id"], ["contributors.id"], name=op.f("fk_events_contributor_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_events_job_id_seq"), "events", ["job_id", "seq"], unique=False)

    op.create_table(
        "invites",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("code_hash", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("expires_at", _Moment, nullable=False),
        sa.Column("used_at", _Moment, nullable=True),
        sa.Column("used_by", sa.Text(), nullable=True),
        sa.Column("revoked_at", _Moment, nullable=True),
        sa.ForeignKeyConstraint(["used_by"], ["contributors.id"], name=op.f("fk_invites_used_by")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invites")),
        sa.UniqueConstraint("code_hash", name=op.f("uq_invites_code_hash")),
    )


def downgrade() -> None:
    op.drop_table("invites")
    op.drop_index(op.f("ix_events_job_id_seq"), table_name="events")

    op.drop_table("events")
    op.drop_table("metrics")
    op.drop_index(op.f("ix_contributors_state"), table_name="contributors")
    op.drop_index(op.f("ix_contributors_name"), table_name="contributors")
    op.drop_index(op.f("ix_contributors_job_id"), table_name="contributors")

    op.drop_table("contributors")
    op.drop_table("artifacts")
    op.drop_index(op.f("ix_jobs_state"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_created_at_id"), table_name="jobs")

    op.drop_table("jobs")
    op.drop_table("api_keys")
