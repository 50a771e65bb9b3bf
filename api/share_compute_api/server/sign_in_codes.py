"""One-time codes for signing in a browser. A sign-in link contains a code, so that links and logs contain no key."""

from __future__ import annotations

import hashlib
import secrets
import threading
from datetime import datetime, timedelta
from typing import Final

LIFE: Final = timedelta(minutes=15)
_MOST: Final = 1000


class SignInCodes:
    """Issues and redeems one-time codes; keeps only the hashes of unused codes, in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, datetime]] = {}

    def make(self, key_id: str, now: datetime) -> tuple[str, datetime]:
        """Return a new one-time code for a key, and the time at which it expires."""
        code, expires_at = secrets.token_urlsafe(32), now + LIFE
        with self._lock:
            self._open = {one: found for one, found in self._open.items() if found[1] > now}
            while len(self._open) >= _MOST:
                del self._open[next(iter(self._open))]
            self._open[_digest(code)] = key_id, expires_at
        return code, expires_at

    def use(self, code: str, now: datetime) -> str | None:
        """Redeem a code and return the id of its key; None if the code is unknown, used or expired."""
        with self._lock:
            found = self._open.pop(_digest(code), None)
        return found[0] if found is not None and now < found[1] else None


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()
