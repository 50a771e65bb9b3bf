"""Who may do what: API keys for people and programs, a key of its own for each contributor."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from share_compute.errors import NotAuthorized
from share_compute.store import ApiKeyRecord, ContributorRecord
from share_compute_api.context import InContext

_api_key = HTTPBearer(
    auto_error=False,
    scheme_name="ApiKey",
    description="The key that `share-compute up` wrote into credentials.json of its data folder.",
)
_contributor_key = HTTPBearer(
    auto_error=False,
    scheme_name="ContributorKey",
    description="The key that a contributor got when it joined; opens its own routes only.",
)


def require_api_key(
    context: InContext, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_api_key)]
) -> ApiKeyRecord:
    """Let requests with a valid API key pass."""
    record = context.store.keys.verify(bearer.credentials) if bearer else None
    if record is None:
        raise NotAuthorized(
            "this API key is not valid" if bearer else "this needs an API key",
            mend="send the header Authorization: Bearer KEY; `share-compute up` shows the key",
        )
    return record


def require_contributor(
    contributor_id: str,
    context: InContext,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_contributor_key)],
) -> ContributorRecord:
    """Let a contributor pass that shows its own key."""
    if bearer is None:
        raise NotAuthorized("this needs the contributor's own key", mend="join with an invite to get one")
    return context.store.contributors.authorize(contributor_id, bearer.credentials)


SelfContributor = Annotated[ContributorRecord, Depends(require_contributor)]
