"""Route that returns the last rounds of a job whose branches merge."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from share_compute_api.schemas.rounds import RoundsView
from share_compute_api.server.auth import READ
from share_compute_api.server.context import InContext
from share_compute_api.server.problems import documented

router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=READ)
_KIND = "round"


@router.get("/{job_id}/rounds", operation_id="getRounds", responses=documented(404, 409))
def get_rounds(
    job_id: str, context: InContext, limit: Annotated[int, Query(ge=1, le=100)] = 12
) -> RoundsView:
    """Return the last rounds of a training job, oldest first; ``rounds`` is empty for jobs without rounds."""
    policy = context.store.jobs.get(job_id).training.training.rounds
    if policy is None:
        return RoundsView(rounds=[])
    # The time of a round begins with the previous merge.
    events = context.store.events.last(job_id, _KIND, limit + 1)
    ids = {machine for event in events for branch in event.data["branches"] for machine in branch["machines"]}
    names = {machine.id: machine.name for machine in context.store.contributors.list(ids=ids)}
    view = RoundsView.of(events, names, merges_apart=policy.merges_apart)
    return RoundsView(rounds=view.rounds[-limit:])
