"""Route that lists the trials of a sweep."""

from __future__ import annotations

from fastapi import APIRouter

from share_compute_api.schemas.sweeps import SweepView
from share_compute_api.server.auth import READ
from share_compute_api.server.context import InContext
from share_compute_api.server.problems import documented
from share_compute_api.server.sweeps import sweep_view

router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=READ)


@router.get("/{job_id}/trials", operation_id="getTrials", responses=documented(404, 409))
def get_trials(job_id: str, context: InContext) -> SweepView:
    """Return the trials of a sweep, best first, with their settings and values."""
    return sweep_view(context.store, context.store.jobs.get(job_id))
