"""Rename ``training.gradient_fusion`` to ``training.communication_fusion.allreduce`` in stored jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_OLD, _NEW = "gradient_fusion", "communication_fusion"
_jobs = sa.table("jobs", sa.column("id", sa.Text()), sa.column("spec", _JSON))


def upgrade() -> None:
    def renamed(key: str, value: Any) -> tuple[str, Any]:
        if key == _OLD:
            return _NEW, {"allreduce": value}
        return key.replace(
            f"training.{_OLD}.", f"training.{_NEW}.allreduce."
        ), value  # a field that a sweep draws

    _change(renamed)


def downgrade() -> None:
    def renamed(key: str, value: Any) -> tuple[str, Any]:
        if key == _NEW:
            return _OLD, value.get("allreduce", {"mode": "auto"})
        return key.replace(f"training.{_NEW}.allreduce.", f"training.{_OLD}."), value

    _change(renamed)


def _change(renamed: Callable[[str, Any], tuple[str, Any]]) -> None:
    """Apply a function to each (key, value) of the stored jobs, at any depth."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return dict(renamed(key, changed(part)) for key, part in value.items())
        return [changed(part) for part in value] if isinstance(value, list) else value

    connection = op.get_bind()
    for row, spec in connection.execute(sa.select(_jobs.c.id, _jobs.c.spec)).all():
        if changed(spec) != spec:
            connection.execute(sa.update(_jobs).where(_jobs.c.id == row).values(spec=changed(spec)))
