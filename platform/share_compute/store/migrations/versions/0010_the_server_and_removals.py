"""Add the server's fencing token, the table of folders to remove, and the time of a job's deletion request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    table = op.create_table(
        "server_epoch",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_server_epoch")),
    )
    op.bulk_insert(table, [{"id": 1, "epoch": 0, "holder": "", "claimed_at": None}])
    op.create_table(
        "removals",
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("path", name=op.f("pk_removals")),
    )
    op.add_column("jobs", sa.Column("delete_requested_at", sa.DateTime(timezone=True), nullable=True))
