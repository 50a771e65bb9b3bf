"""Add a column of jobs: whether the job can lose any one machine without losing a step."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column: sa.Column[bool] = sa.Column(
        "is_protected", sa.Boolean(), server_default=sa.false(), nullable=False
    )
    op.add_column("jobs", column)
