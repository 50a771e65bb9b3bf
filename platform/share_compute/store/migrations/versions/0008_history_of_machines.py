"""Add indexes by machine to events and to used invites, so that a machine's history is found without a full scan."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_events_contributor_id_seq", "events", ["contributor_id", "seq"])
    op.create_index("ix_invites_used_by", "invites", ["used_by"])
