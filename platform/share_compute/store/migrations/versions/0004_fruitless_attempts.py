"""Add to jobs the number of consecutive attempts that ended before they committed a step."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("fruitless_attempts", sa.Integer, nullable=False, server_default="0"))
