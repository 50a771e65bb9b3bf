"""Add the choice between compiled and eager code to jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("computation", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "computation")
