"""Authorization: API keys for people and programs, sessions for browsers, and one key for each contributor.

Each route either declares the scope that it needs, by a dependency of this module, or is listed in `OPEN`.
`check_routes` rejects an app with any other route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from anyio import to_thread
from fastapi import Depends, FastAPI, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes

from share_compute.errors import MissingScope, NotAuthorized, NotOwner, OtherSite
from share_compute.scopes import Scope, held, in_order
from share_compute.store import AgentRecord, ApiKeyRecord, ContributorRecord
from share_compute_api.server.context import Context, InContext

Found = TypeVar("Found")
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
OPEN: Final = frozenset({"getHealth", "getJobSchema", "signIn", "getSession", "signOut", "preflight", "join"})
"""Operations that need no API key. ``preflight`` and ``join`` need an invite, ``signIn`` a key or a one-time code."""
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""HTTP methods that change nothing."""


def require_api_key(
    request: Request,
    needed: SecurityScopes,
    context: InContext,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_api_key)],
) -> ApiKeyRecord:
    """Return the API key of a request, or of the session in its cookie, if the key has the needed scopes.

    Raises:
        NotAuthorized: the request has neither a valid key nor a valid session.
        OtherSite: the request uses a session, and `refuse_other_sites` rejects it.
        MissingScope: the key lacks a scope, or is a contributor's key.
        TooManyAttempts: too many wrong keys came from the request's address.
    """
    if bearer is not None:
        key = bearer.credentials
        record = context.guesses.check(request, key, lambda: context.store.keys.verify(key))
    else:
        found = session_of(request, context)
        record = None if found is None else found[0]
        if record is not None:
            refuse_other_sites(request)
    if record is None and bearer is not None and context.store.contributors.of_key(bearer.credentials):
        raise _missing(needed, (Scope.contribute,), "send an API key; a machine's own key is for its agent")
    if record is None:
        raise NotAuthorized(
            "this needs an API key" if bearer is None else "this API key is not valid",
            hint="send the header Authorization: Bearer KEY; `share-compute keys create` makes a key",
        )
    if not held(record.scopes).issuperset(needed.scopes):
        raise _missing(needed, record.scopes, "ask an operator for a key with this scope")
    return record


def needs(scope: Scope) -> Any:
    """Return a FastAPI dependency that requires an API key with this scope."""
    return Security(require_api_key, scopes=[scope.value])


CHAT, READ, SUBMIT, ADMIN = ([needs(scope)] for scope in (Scope.chat, Scope.read, Scope.submit, Scope.admin))
"""Dependencies of routes that need a scope but do not use the key: ``@router.get(..., dependencies=READ)``."""
Chatter = Annotated[ApiKeyRecord, needs(Scope.chat)]
Reader = Annotated[ApiKeyRecord, needs(Scope.read)]
Submitter = Annotated[ApiKeyRecord, needs(Scope.submit)]
Admin = Annotated[ApiKeyRecord, needs(Scope.admin)]
"""Type of a route parameter: the request's API key, which has the scope `admin`.

`Chatter`, `Reader` and `Submitter` are the corresponding types for the scopes `chat`, `read` and `submit`.
"""


def require_owner(caller: ApiKeyRecord, owner: str | None, what: str) -> None:
    """Raise NotOwner unless the caller is the owner or an admin.

    Args:
        caller: API key of the request.
        owner: id of the API key that owns the object; None if only admins may change it.
        what: name of the object, for the error.
    """
    if not caller.owns(owner):
        raise NotOwner(
            f"{what} belongs to another key",
            hint="use the key that made it, or one with the scope admin",
        )


def _missing(needed: SecurityScopes, found: tuple[Scope, ...], hint: str) -> MissingScope:
    has = [scope.value for scope in found]
    return MissingScope(
        f"this needs the scope {' and '.join(needed.scopes)}; this key has {', '.join(has)}",
        hint=hint,
        details={"needed": list(needed.scopes), "has": has},
    )


def session_of(request: Request, context: Context) -> tuple[ApiKeyRecord, datetime] | None:
    """Return the API key and the expiry of the request's browser session; None without a valid session."""
    token = request.cookies.get(context.sessions.cookie)
    found = None if token is None else context.sessions.read(token, context.store.clock())
    if found is None:
        return None
    key_id, expires_at = found
    record = context.store.keys.valid(key_id)
    return None if record is None else (record, expires_at)


def refuse_other_sites(request: Request) -> None:
    """Reject requests from pages of other origins (CSRF protection).

    The cookie's attribute ``SameSite=Strict`` is not enough, because another port of the same host is the same site.
    The header ``Sec-Fetch-Site`` decides. Browsers send it on secure connections only; without it, ``Origin`` must
    match ``Host``.

    Raises:
        OtherSite: the request comes from another origin, or its method is unsafe and no header shows the origin.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_safe = request.method in _SAFE
    if site is not None:
        # Browsers send "none" if the user typed the address or opened a bookmark.
        is_ours = site == "same-origin" or (is_safe and site == "none")
    elif origin is not None:
        host = request.headers.get("host", "")
        is_ours = host != "" and origin.partition("://")[2].lower() == host.lower()
    else:
        is_ours = is_safe
    if not is_ours:
        raise OtherSite(
            "this was not sent by a page of this server",
            hint="use the dashboard itself; programs send the header Authorization: Bearer KEY",
        )


def require_contributor(
    contributor_id: str,
    request: Request,
    needed: SecurityScopes,
    context: InContext,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_contributor_key)],
) -> ContributorRecord:
    """Return the contributor ``contributor_id``, after a check that the request carries this contributor's own key.

    Raises:
        NotAuthorized: the request has no key, or not the key of this contributor.
        MissingScope: the key is an API key.
        TooManyAttempts: too many wrong keys came from the request's address.
    """
    read = partial(context.store.contributors.authorize, contributor_id)
    return _of_contributor(read, request, needed, context, bearer)


async def require_agent(
    contributor_id: str,
    request: Request,
    needed: SecurityScopes,
    context: InContext,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_contributor_key)],
) -> AgentRecord:
    """Return the data that the agent of ``contributor_id`` shows, after the check of `require_contributor`.

    A machine whose heartbeats are delayed counts as lost, so this runs in the threads that are reserved for heartbeats.
    """
    read = partial(context.store.cluster.agent, contributor_id)
    return await to_thread.run_sync(
        _of_contributor, read, request, needed, context, bearer, limiter=context.heartbeats
    )


def _of_contributor(
    read: Callable[[str], Found],
    request: Request,
    needed: SecurityScopes,
    context: Context,
    bearer: HTTPAuthorizationCredentials | None,
) -> Found:
    """Return the result of ``read`` for the request's key; see `require_contributor` for the errors.

    Args:
        read: reads data of a contributor; raises NotAuthorized if the key is not the contributor's.
        request: the request.
        needed: scopes that the route declares.
        context: services of the server.
        bearer: key of the request.
    """
    hint = "join with an invite to get one"
    if bearer is None:
        raise NotAuthorized("this needs the contributor's own key", hint=hint)
    key = bearer.credentials

    def owned() -> Found:
        try:
            return read(key)
        except NotAuthorized:
            api_key = context.store.keys.verify(key)
            if api_key is None:
                raise
        raise _missing(needed, api_key.scopes, hint)

    found = context.guesses.check(request, key, owned)
    assert found is not None
    return found


SelfContributor = Annotated[ContributorRecord, Security(require_contributor, scopes=[Scope.contribute.value])]
SelfAgent = Annotated[AgentRecord, Security(require_agent, scopes=[Scope.contribute.value])]
"""State and work of the contributor that sends a heartbeat, authenticated by its own key."""


def check_routes(app: FastAPI) -> None:
    """Raise RuntimeError unless each route of the API either declares a scope or is in `OPEN`, but not both."""
    for route, scopes in declared_scopes(app):
        if bool(scopes) == (route.operation_id in OPEN):
            raise RuntimeError(f"{route.path} must name a scope, or be open, and not both")


def declared_scopes(app: FastAPI) -> Iterator[tuple[RouteContext, tuple[Scope, ...]]]:
    """Yield each route of the API with the scopes that it declares."""
    for route in iter_route_contexts(app.routes):
        if isinstance(route.original_route, APIRoute):
            yield route, in_order({Scope(name) for name in _scopes(route.dependant)})


def _scopes(dependant: Dependant) -> Iterator[str]:
    yield from dependant.own_oauth_scopes or ()
    for inner in dependant.dependencies:
        yield from _scopes(inner)
