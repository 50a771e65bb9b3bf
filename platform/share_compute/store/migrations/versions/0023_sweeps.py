"""Add columns of jobs for the sweep of a trial, the settings of a trial, and the progress of a sweep."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("sweep_id", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("trial", _JSON, nullable=True))
    op.add_column("jobs", sa.Column("sweep_progress", _JSON, nullable=True))
    op.create_index("ix_jobs_sweep_id", "jobs", ["sweep_id"])


def downgrade() -> None:
    op.drop_index("ix_jobs_sweep_id", "jobs")
    op.drop_column("jobs", "sweep_progress")
    op.drop_column("jobs", "trial")
    op.drop_column("jobs", "sweep_id")
