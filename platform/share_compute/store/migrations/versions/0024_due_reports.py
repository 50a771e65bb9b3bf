"""Add the reports of ended jobs that are still to be written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("due_reports", _JSON, nullable=False, server_default="[]"))
    op.add_column(
        "jobs", sa.Column("has_due_reports", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.create_index("ix_jobs_has_due_reports", "jobs", ["has_due_reports"])


def downgrade() -> None:
    op.drop_index("ix_jobs_has_due_reports", "jobs")
    op.drop_column("jobs", "has_due_reports")
    op.drop_column("jobs", "due_reports")
