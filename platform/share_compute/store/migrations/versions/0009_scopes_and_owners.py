"""Add scopes to API keys, and owners to jobs and deployments. An owner is the API key that made the job or deployment.

Existing keys could do everything, so they get the scope ``admin``. Existing rows get no owner: only admins may change
them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
    op.add_column("api_keys", sa.Column("scopes", json, nullable=False, server_default="[]"))
    op.execute("UPDATE api_keys SET scopes = '[\"admin\"]'")
    op.add_column("jobs", sa.Column("owner", sa.Text(), nullable=True))
    op.add_column("deployments", sa.Column("owner", sa.Text(), nullable=True))
