"""Add the table of deployments: models that are served."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "deployments",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("spec", json, nullable=False),
        sa.Column("plans", json, nullable=False),
        sa.Column("error", json, nullable=True),
        sa.Column("created_at", moment, nullable=False),
        sa.Column("ready_at", moment, nullable=True),
        sa.Column("ended_at", moment, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deployments")),
    )
    op.create_index(op.f("ix_deployments_created_at_id"), "deployments", ["created_at", "id"], unique=False)
    op.create_index(op.f("ix_deployments_name"), "deployments", ["name"], unique=False)
    op.create_index(op.f("ix_deployments_state"), "deployments", ["state"], unique=False)
