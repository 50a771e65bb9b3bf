"""Routes for a browser's session: sign in with an API key or a one-time code, show the session, sign out."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter, Request, Response

from share_compute.errors import NotAuthorized
from share_compute.store import ApiKeyRecord
from share_compute_api.schemas.bodies import SessionView, SignInCode, SignInRequest
from share_compute_api.server.auth import Reader, refuse_other_sites, session_of
from share_compute_api.server.context import Context, InContext
from share_compute_api.server.problems import documented

router = APIRouter(prefix="/session", tags=["session"])


@router.post("", status_code=201, operation_id="signIn", responses=documented(401, 403, 429))
def sign_in(wanted: SignInRequest, request: Request, response: Response, context: InContext) -> SessionView:
    """Exchange an API key or one-time code for a session cookie. Requests from pages of other sites are refused."""
    refuse_other_sites(request)
    secret = wanted.key or wanted.code or ""
    record = context.guesses.check(request, secret, lambda: _signed_in_by(wanted, context))
    if record is None:
        raise NotAuthorized(
            "this API key is not valid"
            if wanted.key
            else "this sign-in link was used already, or has expired",
            hint="`share-compute sign-in` on the server's machine makes a new link",
        )
    return _begin(record, request, response, context)


@router.post("/codes", status_code=201, operation_id="createSignInCode", responses=documented(401))
def create_code(caller: Reader, request: Request, context: InContext) -> SignInCode:
    """Create a one-time code that signs a browser in with the caller's key. The code expires within minutes."""
    code, expires_at = context.codes.make(caller.id, context.store.clock())
    return SignInCode(code=code, url=f"{context.url(request)}/#code={code}", expires_at=expires_at)


@router.get("", operation_id="getSession")
def get_session(request: Request, response: Response, context: InContext) -> SessionView:
    """Return this browser's session, and renew an old one. All fields are null if the browser is not signed in."""
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
    """Delete the session's cookie; the API key stays valid."""
    refuse_other_sites(request)
    response.delete_cookie(
        context.sessions.cookie, path="/", secure=_is_secure(request), httponly=True, samesite="strict"
    )


def _signed_in_by(wanted: SignInRequest, context: Context) -> ApiKeyRecord | None:
    if wanted.key is not None:
        return context.store.keys.verify(wanted.key)
    key_id = context.codes.use(wanted.code or "", context.store.clock())
    return None if key_id is None else context.store.keys.valid(key_id)


def _begin(record: ApiKeyRecord, request: Request, response: Response, context: Context) -> SessionView:
    token, expires_at = context.sessions.issue(record.id, context.store.clock())
    # A cookie without a maximum age is deleted when the browser is closed.
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
    """Return whether the browser uses HTTPS, either to this server or to a trusted reverse proxy."""
    return request.url.scheme == "https"
