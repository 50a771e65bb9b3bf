"""Add to contributors the number of times that they computed wrong results, and the cause of their quarantine."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("contributors", sa.Column("offences", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("contributors", sa.Column("quarantined_for", sa.Text(), nullable=True))
