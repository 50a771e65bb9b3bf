"""Add to invites the number of uses and a memory limit; add to contributors the invite that they joined with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("invites", sa.Column("uses", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("invites", sa.Column("memory_bytes", sa.BigInteger(), nullable=True))
    op.add_column("contributors", sa.Column("invite_id", sa.Text(), nullable=True))
    op.create_index("ix_contributors_invite_id", "contributors", ["invite_id"])
    op.execute(
        "UPDATE contributors SET invite_id = (SELECT id FROM invites WHERE invites.used_by = contributors.id)"
    )
    op.drop_index("ix_invites_used_by", "invites")
    # SQLite cannot drop a column that a constraint uses, so the table is rewritten.
    with op.batch_alter_table("invites") as invites:
        invites.drop_constraint("fk_invites_used_by", type_="foreignkey")
        invites.drop_column("used_by")
        invites.drop_column("used_at")
