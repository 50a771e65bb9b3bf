"""Rename ``pools`` to ``stages`` and ``buddies`` to ``backups`` in stored rows, and one error code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_NAMES = {"pools": "stages", "members_per_pool": "members_per_stage", "pool": "stage", "buddies": "backups"}
_CODES = {"library-lost": "shard-store-lost"}
_KINDS = ("planned", "reformed", "replan-proposed", "measured", "work")
"""Kinds of events that hold a plan, the times of its stages, or the index of a stage."""
_WITH_ERRORS = ("state", "ended", "deployment")

_jobs = sa.table(
    "jobs",
    sa.column("id", sa.Text()),
    *(sa.column(name, _JSON) for name in ("spec", "plan", "measured", "proposal", "error")),
)
_deployments = sa.table(
    "deployments",
    sa.column("id", sa.Text()),
    *(sa.column(name, _JSON) for name in ("spec", "plans", "error")),
)
_events = sa.table(
    "events", sa.column("seq", sa.BigInteger()), sa.column("kind", sa.Text()), sa.column("data", _JSON)
)


def upgrade() -> None:
    _rename(_NAMES)
    _recode(_CODES)


def downgrade() -> None:
    _rename({new: old for old, new in _NAMES.items()})
    _recode({new: old for old, new in _CODES.items()})


def _rename(names: Mapping[str, str]) -> None:
    def renamed(value: Any) -> Any:
        """Return the value with its keys renamed, also those inside its ``plan`` and its ``parallelism``."""
        if not isinstance(value, dict):
            return value
        own = {names.get(key, key): part for key, part in value.items()}
        return {key: renamed(part) if key in ("plan", "parallelism") else part for key, part in own.items()}

    def all_renamed(values: Any) -> Any:
        return [renamed(value) for value in values] if isinstance(values, list) else values

    for name in ("spec", "plan", "measured", "proposal"):
        _change(_jobs, _jobs.c.id, _jobs.c[name], renamed)
    _change(_deployments, _deployments.c.id, _deployments.c.spec, renamed)
    _change(_deployments, _deployments.c.id, _deployments.c.plans, all_renamed)
    _change(_events, _events.c.seq, _events.c.data, renamed, _events.c.kind.in_(_KINDS))


def _recode(codes: Mapping[str, str]) -> None:
    def recoded(error: Any) -> Any:
        """Return an error with the new code."""
        if not isinstance(error, dict) or error.get("code") not in codes:
            return error
        return {**error, "code": codes[error["code"]]}

    def in_event(data: Any) -> Any:
        """Return the data of an event with the new code in its error, if it has an error."""
        return (
            {**data, "error": recoded(data["error"])} if isinstance(data, dict) and "error" in data else data
        )

    _change(_jobs, _jobs.c.id, _jobs.c.error, recoded)
    _change(_deployments, _deployments.c.id, _deployments.c.error, recoded)
    _change(_events, _events.c.seq, _events.c.data, in_event, _events.c.kind.in_(_WITH_ERRORS))


def _change(table: Any, key: Any, column: Any, change: Callable[[Any], Any], *wanted: Any) -> None:
    connection = op.get_bind()
    for row, value in connection.execute(sa.select(key, column).where(column.is_not(None), *wanted)).all():
        changed = change(value)
        if changed != value:
            connection.execute(sa.update(table).where(key == row).values({column.name: changed}))
