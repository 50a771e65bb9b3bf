"""Add the pictures of the last predictions of training jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("pictures", _JSON, nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "pictures")
