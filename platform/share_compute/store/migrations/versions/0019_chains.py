"""Add the links of training jobs: what starts from their results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("links", _JSON, server_default="[]", nullable=False))
    waits: sa.Column[bool] = sa.Column(
        "has_waiting_links", sa.Boolean(), server_default=sa.false(), nullable=False
    )
    op.add_column("jobs", waits)
    op.create_index("ix_jobs_has_waiting_links", "jobs", ["has_waiting_links"])


def downgrade() -> None:
    op.drop_index("ix_jobs_has_waiting_links", "jobs")
    op.drop_column("jobs", "has_waiting_links")
    op.drop_column("jobs", "links")
