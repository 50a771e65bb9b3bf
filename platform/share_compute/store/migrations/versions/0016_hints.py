"""Rename the key ``mend`` of errors in stored rows to ``hint``."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_KINDS = ("state", "deployment", "ended")
"""Kinds of events that may hold an error."""


def upgrade() -> None:
    for name in ("jobs", "deployments"):
        table = sa.table(name, sa.column("id", sa.String()), sa.column("error", _JSON))
        _rename(table, table.c.id, table.c.error, table.c.error.is_not(None))
    events = sa.table(
        "events", sa.column("seq", sa.BigInteger()), sa.column("kind", sa.String()), sa.column("data", _JSON)
    )
    _rename(events, events.c.seq, events.c.data, events.c.kind.in_(_KINDS))


def _rename(table: Any, key: Any, column: Any, wanted: Any) -> None:
    connection = op.get_bind()
    for row, value in connection.execute(sa.select(key, column).where(wanted)).all():
        error = None if value is None else value.get("error", value)  # some rows have a JSON null
        if isinstance(error, dict) and "mend" in error:
            error["hint"] = error.pop("mend")
            connection.execute(sa.update(table).where(key == row).values({column.name: value}))
