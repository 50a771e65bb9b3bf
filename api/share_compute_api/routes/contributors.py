"""Contributors, as people who run or use the pool see them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from share_compute.jobs.states import ContributorState
from share_compute.store import ContributorRecord
from share_compute_api.context import InContext
from share_compute_api.problems import documented
from share_compute_api.schemas import ContributorList

router = APIRouter(prefix="/contributors", tags=["contributors"])


@router.get("", operation_id="listContributors")
def list_contributors(
    context: InContext,
    state: Annotated[list[ContributorState] | None, Query(description="May be given several times.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 500,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> ContributorList:
    """List machines in the order they joined, in pages. Without ``state`` those gone for over a day are left out."""
    found, next_cursor = context.store.contributors.page(states=state, limit=limit, cursor=cursor)
    return ContributorList(contributors=found, next_cursor=next_cursor)


@router.get("/{contributor_id}", operation_id="getContributor", responses=documented(404))
def get_contributor(contributor_id: str, context: InContext) -> ContributorRecord:
    """Return one machine with what was measured on it."""
    return context.store.contributors.get(contributor_id)


@router.delete("/{contributor_id}", operation_id="sendContributorAway", responses=documented(404))
def send_contributor_away(contributor_id: str, context: InContext) -> ContributorRecord:
    """Ask a machine to hand over and go; it can come back only with a new invite."""
    return context.store.contributors.send_away(contributor_id)
