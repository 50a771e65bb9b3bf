"""One-time codes that sign a browser in, so that no link and no log holds a key."""

from __future__ import annotations

import hashlib
import secrets
import threading
from datetime import datetime, timedelta
from typing import Final

LIFE: Final = timedelta(minutes=15)
_MOST: Final = 1000


class SignInCodes:
    """Codes that were made and not used yet; only their hashes are kept, and only in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, datetime]] = {}

    def make(self, key_id: str, now: datetime) -> tuple[str, datetime]:
        """Return a new code that stands for a key once, and when it expires."""
        code, expires_at = secrets.token_urlsafe(32), now + LIFE
        with self._lock:
            self._open = {one: found for one, found in self._open.items() if found[1] > now}
            while len(self._open) >= _MOST:
                del self._open[next(iter(self._open))]
            self._open[_digest(code)] = key_id, expires_at
        return code, expires_at

    def use(self, code: str, now: datetime) -> str | None:
        """Return the id of the key that a code stands for, and end the code; None if it is not ours, used or over."""
        with self._lock:
            found = self._open.pop(_digest(code), None)
        return found[0] if found is not None and now < found[1] else None


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()
