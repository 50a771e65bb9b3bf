"""Add resumable streams and their parts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "streams",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("deployment_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("request", _JSON, nullable=True),
        sa.Column("prompts", _JSON, nullable=True),
        sa.Column("answer_id", sa.Text(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("is_over", sa.Boolean(), nullable=False),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("read_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expired_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_streams"),
    )
    op.create_index("ix_streams_owner", "streams", ["owner"])
    op.create_index("ix_streams_expired_at", "streams", ["expired_at"])
    op.create_table(
        "stream_parts",
        sa.Column("stream_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("events", _JSON, nullable=False),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.id"], name="fk_stream_parts_stream_id"),
        sa.PrimaryKeyConstraint("stream_id", "number", name="pk_stream_parts"),
    )


def downgrade() -> None:
    op.drop_table("stream_parts")
    op.drop_table("streams")
