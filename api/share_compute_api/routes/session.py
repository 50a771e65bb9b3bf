"""The session of a browser: sign in with an API key, see who is signed in, sign out."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter, Request, Response

from share_compute.errors import NotAuthorized
from share_compute.store import ApiKeyRecord
from share_compute_api.auth import refuse_other_sites, session_of
from share_compute_api.context import Context, InContext
from share_compute_api.problems import documented
from share_compute_api.schemas import SessionView, SignInRequest

router = APIRouter(prefix="/session", tags=["session"])


@router.post("", status_code=201, operation_id="signIn", responses=documented(401, 403))
def sign_in(wanted: SignInRequest, request: Request, response: Response, context: InContext) -> SessionView:
    """Exchange an API key for a cookie that scripts cannot read; only a page of this server may."""
    refuse_other_sites(request)
    record = context.store.keys.verify(wanted.key)
    if record is None:
        raise NotAuthorized("this API key is not valid", mend="`share-compute up` shows one that is")
    return _begin(record, request, response, context)


@router.get("", operation_id="getSession")
def get_session(request: Request, response: Response, context: InContext) -> SessionView:
    """Say by which key this browser is signed in, if it is, and renew a session that is used."""
    response.headers["Cache-Control"] = "no-store"
    found = session_of(request, context)
    if found is None:
        return SessionView(key=None, expires_at=None, last_event=None)
    record, expires_at = found
    if context.sessions.is_due(expires_at, context.store.clock()):
        return _begin(record, request, response, context)
    return _view(record, expires_at, context)


@router.delete("", status_code=204, operation_id="signOut", responses=documented(403))
def sign_out(request: Request, response: Response, context: InContext) -> None:
    """Take the cookie back; the key stays as it is."""
    refuse_other_sites(request)
    response.delete_cookie(
        context.sessions.cookie, path="/", secure=_is_secure(request), httponly=True, samesite="strict"
    )


def _begin(record: ApiKeyRecord, request: Request, response: Response, context: Context) -> SessionView:
    token, expires_at = context.sessions.issue(record.id, context.store.clock())
    # Without an age, so that it goes when the browser is closed.
    response.set_cookie(
        context.sessions.cookie,
        token,
        path="/",
        secure=_is_secure(request),
        httponly=True,
        samesite="strict",
    )
    return _view(record, expires_at, context)


def _view(record: ApiKeyRecord, expires_at: datetime, context: Context) -> SessionView:
    return SessionView(key=record, expires_at=expires_at, last_event=context.store.events.last_seq())


def _is_secure(request: Request) -> bool:
    """Whether the browser speaks https to us, or to the proxy before us that uvicorn trusts."""
    return request.url.scheme == "https"
