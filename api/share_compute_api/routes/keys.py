"""Routes for API keys. Each person or program should have its own key, so that keys can be revoked one at a time."""

from __future__ import annotations

from fastapi import APIRouter, Request

from share_compute.errors import MissingScope
from share_compute.scopes import held
from share_compute.settings import variable_of
from share_compute.store import ApiKeyRecord
from share_compute_api.schemas.bodies import KeyCreated, KeyList, KeyRequest
from share_compute_api.server.auth import ADMIN, Admin
from share_compute_api.server.context import InContext
from share_compute_api.server.problems import documented

router = APIRouter(prefix="/keys", tags=["keys"])


@router.post("", status_code=201, operation_id="createKey")
def create_key(wanted: KeyRequest, context: InContext, caller: Admin, request: Request) -> KeyCreated:
    """Create an API key. Only this answer contains the key. The caller's key must have every scope of the new key."""
    lacking = held(wanted.scopes) - held(caller.scopes)
    if lacking:
        raise MissingScope(
            f"a key without the scope {min(lacking)} cannot make a key with it",
            hint="leave out the scope, or use a key that has it",
        )
    record, key = context.store.keys.create(wanted.name, wanted.scopes)
    settings = {"url": context.url(request), "api_key": key, "fingerprint": context.fingerprint}
    words = ["export", *(f"{variable_of(name)}={value}" for name, value in settings.items() if value)]
    return KeyCreated(
        id=record.id, name=record.name, scopes=record.scopes, key=key, export_command=" ".join(words)
    )


@router.get("", operation_id="listKeys")
def list_keys(context: InContext, caller: Admin) -> KeyList:
    """List all API keys, oldest first, without the keys themselves."""
    return KeyList(keys=context.store.keys.list(), caller_id=caller.id)


@router.delete("/{key_id}", operation_id="revokeKey", dependencies=ADMIN, responses=documented(404, 409))
def revoke_key(key_id: str, context: InContext) -> ApiKeyRecord:
    """Revoke a key; later requests with it are refused. The last key with the scope ``admin`` cannot be revoked.

    Revoking a key again changes nothing.
    """
    return context.store.keys.revoke(key_id)
