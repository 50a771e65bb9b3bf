"""API keys: one for each person or program, so that each can be ended alone."""

from __future__ import annotations

from fastapi import APIRouter

from share_compute.store import ApiKeyRecord
from share_compute_api.context import InContext
from share_compute_api.problems import documented
from share_compute_api.schemas import KeyCreated, KeyList, KeyRequest

router = APIRouter(prefix="/keys", tags=["keys"])


@router.post("", status_code=201, operation_id="createKey")
def create_key(wanted: KeyRequest, context: InContext) -> KeyCreated:
    """Make an API key. Only this answer shows it."""
    record, key = context.store.keys.create(wanted.name)
    return KeyCreated(id=record.id, name=record.name, key=key)


@router.get("", operation_id="listKeys")
def list_keys(context: InContext) -> KeyList:
    """List all API keys, oldest first, without the keys themselves."""
    return KeyList(keys=context.store.keys.list())


@router.delete("/{key_id}", operation_id="revokeKey", responses=documented(404))
def revoke_key(key_id: str, context: InContext) -> ApiKeyRecord:
    """End a key, from the next request on; twice changes nothing. A server that has none makes one at its start."""
    return context.store.keys.revoke(key_id)
