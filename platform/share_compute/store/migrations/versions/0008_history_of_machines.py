"""Add an index for the events of one machine, so that its history is found without reading all events."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_events_contributor_id_seq", "events", ["contributor_id", "seq"])
    op.create_index("ix_invites_used_by", "invites", ["used_by"])
