"""Creates, verifies and revokes API keys of the REST API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import datetime
from time import monotonic

from sqlalchemy import select
from sqlalchemy.orm import Session

from share_compute.errors import Conflict, NotFound
from share_compute.scopes import Scope, in_order
from share_compute.store.database.database import Database
from share_compute.store.database.tables import ApiKeyRow
from share_compute.store.records import ApiKeyRecord
from share_compute.store.secret import digest, matches, new_id, new_key
from share_compute.store.suggestions import suggested_key

_VERIFIED_S = 1.0
_MOST_VERIFIED = 1000


class ApiKeys:
    """The table of API keys."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._verified: dict[str, tuple[ApiKeyRecord, float]] = {}
        """Cached (record, expiry in seconds of the monotonic clock) of each verified key, by hash of the key."""
        self._revocations = 0

    def create(self, name: str, scopes: Collection[Scope] = (Scope.chat,)) -> tuple[ApiKeyRecord, str]:
        """Create a key with these scopes; return its record and the key, which cannot be read again."""
        key = new_key("sck")
        with self._database.write() as session:
            row = ApiKeyRow(
                id=new_id("key"),
                name=name,
                key_hash=digest(key),
                scopes=[scope.value for scope in in_order(scopes)],
                created_at=self._clock(),
            )
            session.add(row)
            session.flush()
            return ApiKeyRecord.model_validate(row), key

    def verify(self, key: str) -> ApiKeyRecord | None:
        """Return the record of a key if it is valid now, else None.

        A valid result is cached for `_VERIFIED_S` seconds, or until `revoke` is called.
        """
        now_s, key_hash, revocations = monotonic(), digest(key), self._revocations
        known = self._verified.get(key_hash)
        if known is not None and known[1] > now_s:
            return known[0]
        with self._database.read() as session:
            row = session.scalar(select(ApiKeyRow).where(ApiKeyRow.key_hash == key_hash))
            if row is None or row.revoked_at is not None or not matches(key, row.key_hash):
                return None
            record = ApiKeyRecord.model_validate(row)
        with self._lock:
            # if the numbers differ, this key may have been revoked after it was read
            if self._revocations == revocations:
                if len(self._verified) >= _MOST_VERIFIED:
                    self._verified.clear()
                self._verified[key_hash] = (record, now_s + _VERIFIED_S)
        return record

    def valid(self, key_id: str) -> ApiKeyRecord | None:
        """Return the record of the key with this id if it is valid now, else None."""
        with self._database.read() as session:
            row = session.get(ApiKeyRow, key_id)
            return None if row is None or row.revoked_at is not None else ApiKeyRecord.model_validate(row)

    def list(self) -> list[ApiKeyRecord]:
        """Return all keys, oldest first."""
        with self._database.read() as session:
            rows = session.scalars(select(ApiKeyRow).order_by(ApiKeyRow.created_at, ApiKeyRow.id))
            return [ApiKeyRecord.model_validate(row) for row in rows]

    def revoke(self, key_id: str) -> ApiKeyRecord:
        """Revoke a key. A second call changes nothing.

        Raises:
            NotFound: no key has this id.
            Conflict: the key is the last valid one with the scope ``admin``.
        """
        with self._database.write() as session:
            row = session.get(ApiKeyRow, key_id)
            if row is None:
                text = f"there is no API key {key_id}{suggested_key(session, key_id)}"
                raise NotFound(text, hint="share-compute keys list shows them")
            if row.revoked_at is None:
                _require_another_admin(session, row)
                row.revoked_at = self._clock()
            record = ApiKeyRecord.model_validate(row)
        with self._lock:
            self._revocations += 1
            self._verified.clear()
        return record


def _require_another_admin(session: Session, key: ApiKeyRow) -> None:
    working = session.scalars(select(ApiKeyRow).where(ApiKeyRow.revoked_at.is_(None)))
    admins = [row.id for row in working if Scope.admin in row.scopes]
    if admins == [key.id]:
        raise Conflict(
            f"{key.id} is the last key with the scope admin; without it nobody could make keys or invites",
            hint="make another one first: share-compute keys create NAME --scope admin",
        )
