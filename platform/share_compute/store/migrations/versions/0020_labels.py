"""Add tags and groups of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("tags", _JSON, server_default="[]", nullable=False))
    op.add_column("jobs", sa.Column("group", sa.Text(), nullable=True))
    op.create_index("ix_jobs_group", "jobs", ["group"])


def downgrade() -> None:
    op.drop_index("ix_jobs_group", "jobs")
    op.drop_column("jobs", "group")
    op.drop_column("jobs", "tags")
