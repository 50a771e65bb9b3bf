"""Contributors, as people who run or use the pool see them."""

from __future__ import annotations

from fastapi import APIRouter

from share_compute.store import ContributorRecord
from share_compute_api.context import InContext
from share_compute_api.problems import documented
from share_compute_api.schemas import ContributorList

router = APIRouter(prefix="/contributors", tags=["contributors"])


@router.get("", operation_id="listContributors")
def list_contributors(context: InContext) -> ContributorList:
    """List all machines that ever joined, in the order they joined."""
    return ContributorList(contributors=context.store.contributors.list())


@router.get("/{contributor_id}", operation_id="getContributor", responses=documented(404))
def get_contributor(contributor_id: str, context: InContext) -> ContributorRecord:
    """Return one machine with what was measured on it."""
    return context.store.contributors.get(contributor_id)


@router.delete("/{contributor_id}", operation_id="sendContributorAway", responses=documented(404))
def send_contributor_away(contributor_id: str, context: InContext) -> ContributorRecord:
    """Ask a machine to hand over and go; it can come back only with a new invite."""
    return context.store.contributors.send_away(contributor_id)
