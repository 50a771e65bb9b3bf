"""Who may do what: API keys for people and programs, sessions for browsers, a key of its own for each contributor."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from share_compute.errors import NotAuthorized, OtherSite
from share_compute.store import ApiKeyRecord, ContributorRecord
from share_compute_api.context import Context, InContext

_api_key = HTTPBearer(
    auto_error=False,
    scheme_name="ApiKey",
    description="The key that `share-compute up` wrote into credentials.json of its data folder. "
    "A browser that signed in (POST /api/v1/session) sends its cookie instead.",
)
_contributor_key = HTTPBearer(
    auto_error=False,
    scheme_name="ContributorKey",
    description="The key that a contributor got when it joined; opens its own routes only.",
)
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""


def require_api_key(
    request: Request,
    context: InContext,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_api_key)],
) -> ApiKeyRecord:
    """Let requests pass with a valid API key, or with the cookie of a session and from our own pages."""
    if bearer is not None:
        record = context.store.keys.verify(bearer.credentials)
    else:
        found = session_of(request, context)
        record = None if found is None else found[0]
        if record is not None:
            refuse_other_sites(request)
    if record is None:
        raise NotAuthorized(
            "this needs an API key" if bearer is None else "this API key is not valid",
            mend="send the header Authorization: Bearer KEY; `share-compute up` shows the key",
        )
    return record


Caller = Annotated[ApiKeyRecord, Depends(require_api_key)]
"""The key that a request is made by."""


def session_of(request: Request, context: Context) -> tuple[ApiKeyRecord, datetime] | None:
    """Return the key that a browser is signed in by, and when its session ends."""
    token = request.cookies.get(context.sessions.cookie)
    found = None if token is None else context.sessions.read(token, context.store.clock())
    if found is None:
        return None
    key_id, expires_at = found
    record = context.store.keys.valid(key_id)
    return None if record is None else (record, expires_at)


def refuse_other_sites(request: Request) -> None:
    """Refuse what a page of another site makes a browser send, cookies and all.

    ``SameSite=Strict`` keeps the cookie from other sites, but another port of the same host counts as the same one.
    Browsers say where a request is from in ``Sec-Fetch-Site``, or in ``Origin`` where the connection is not secure.

    Raises:
        OtherSite: it is from elsewhere, or it changes something and does not say where it is from.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_safe = request.method in _SAFE
    if site is not None:
        # "none": somebody typed the address.
        is_ours = site == "same-origin" or (is_safe and site == "none")
    elif origin is not None:
        host = request.headers.get("host", "")
        is_ours = host != "" and origin.partition("://")[2].lower() == host.lower()
    else:
        is_ours = is_safe
    if not is_ours:
        raise OtherSite(
            "this was not sent by a page of this server",
            mend="use the dashboard itself; programs send the header Authorization: Bearer KEY",
        )


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
