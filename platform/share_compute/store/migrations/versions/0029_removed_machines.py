"""Rename the time at which a machine was removed."""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE contributors RENAME COLUMN sent_away_at TO removed_at")


def downgrade() -> None:
    op.execute("ALTER TABLE contributors RENAME COLUMN removed_at TO sent_away_at")
