"""Add the deployment to which the batch of a link is bound."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("deployment_id", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "deployment_id")
