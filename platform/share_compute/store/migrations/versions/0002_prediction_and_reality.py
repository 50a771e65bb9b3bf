"""Add to plans the number of microbatches and why machines are idle; add to jobs measurements and proposed plans."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_Json = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_jobs = sa.table("jobs", sa.column("id", sa.Text), sa.column("plan", _Json), sa.column("spec", _Json))
_events = sa.table(
    "events", sa.column("seq", sa.BigInteger), sa.column("kind", sa.Text), sa.column("data", _Json)
)


def upgrade() -> None:
    op.add_column("jobs", sa.Column("measured", _Json, nullable=True))
    op.add_column("jobs", sa.Column("proposal", _Json, nullable=True))
    connection = op.get_bind()
    for job in connection.execute(sa.select(_jobs.c.id, _jobs.c.plan)).all():
        if job.plan is not None:
            changed = _jobs.update().where(_jobs.c.id == job.id).values(plan=_with_reasons(job.plan))
            connection.execute(changed)
    planned = sa.select(_events.c.seq, _events.c.data).where(_events.c.kind == "planned")
    for event in connection.execute(planned).all():
        data = {**event.data, "plan": _with_reasons(event.data["plan"])}
        connection.execute(_events.update().where(_events.c.seq == event.seq).values(data=data))


def _with_reasons(plan: dict[str, Any]) -> dict[str, Any]:
    plan = json.loads(json.dumps(plan))
    members = [member for pool in plan["pools"][:1] for member in pool["members"]]
    plan.setdefault("microbatches", sum(len(member["microbatches"]) for member in members))
    plan["idle"] = [
        {"contributor_id": "", "name": idle, "reason": "it was not needed"} if isinstance(idle, str) else idle
        for idle in plan.get("idle", [])
    ]
    return plan
