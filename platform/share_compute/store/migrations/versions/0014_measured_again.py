"""Add the number of threads and the time of the last measurement to contributors."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("contributors", sa.Column("threads", sa.Integer(), nullable=True))
    op.add_column("contributors", sa.Column("measured_at", sa.DateTime(timezone=True), nullable=True))
