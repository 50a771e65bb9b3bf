"""Add to contributors the first contributor of their host, so that a host's devices can join with one invite."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("contributors", sa.Column("sibling_of", sa.Text(), nullable=True))
    op.create_index("ix_contributors_sibling_of", "contributors", ["sibling_of"])
