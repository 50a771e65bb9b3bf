"""Add the choice between compiled and eager code to deployments."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
    op.add_column("deployments", sa.Column("computation", json, nullable=True))


def downgrade() -> None:
    op.drop_column("deployments", "computation")
