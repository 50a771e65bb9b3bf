"""Add the deployment to which a contributor is leased."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("contributors", sa.Column("deployment_id", sa.Text(), nullable=True))
    op.create_index(op.f("ix_contributors_deployment_id"), "contributors", ["deployment_id"], unique=False)
