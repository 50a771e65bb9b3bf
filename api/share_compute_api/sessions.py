"""Sessions of the dashboard: what a browser keeps in place of the API key that it was given once.

The cookie holds no key but a token: the id of a key and an expiry, signed with a secret of this server. No table
is needed, a restart changes nothing, and since the key is looked up at each request, a session ends with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from share_compute.durable import write_private
from share_compute.errors import Unavailable

LIFE: Final = timedelta(days=7)
"""How long a session lasts that nobody renews."""
_RENEWED_AFTER: Final = timedelta(days=1)
_FILE: Final = "session-secret"
_SECRET_BYTES: Final = 32


class Sessions:
    """Issues tokens and reads them.

    Args:
        folder: the data folder; the secret is made there when it is first needed.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE
        self._lock = threading.Lock()
        self._known: bytes | None = None

    @property
    def cookie(self) -> str:
        """Name of the cookie: browsers do not tell servers on one host apart by port, so each has its own."""
        return f"share-compute-{self._mac('name').lower()[:8]}"

    def issue(self, key_id: str, now: datetime) -> tuple[str, datetime]:
        """Return a token that stands for the key, and when it expires."""
        expires_at = (now + LIFE).replace(microsecond=0)
        return self._signed(f"{key_id}.{int(expires_at.timestamp())}"), expires_at

    def read(self, token: str, now: datetime) -> tuple[str, datetime] | None:
        """Return the id of the key that a token stands for, and when it expires; None if it is not ours or over."""
        content, _, _ = token.rpartition(".")
        if not hmac.compare_digest(token.encode(), self._signed(content).encode()):
            return None
        key_id, _, expiry = content.rpartition(".")
        expires_at = datetime.fromtimestamp(int(expiry), UTC)
        return (key_id, expires_at) if now < expires_at else None

    @staticmethod
    def is_due(expires_at: datetime, now: datetime) -> bool:
        """Whether a session that is used should be renewed."""
        return expires_at - now < LIFE - _RENEWED_AFTER

    def _signed(self, content: str) -> str:
        return f"{content}.{self._mac(f'session {content}')}"

    def _mac(self, text: str) -> str:
        mac = hmac.digest(self._secret(), text.encode(), hashlib.sha256)
        return base64.b32encode(mac).decode().rstrip("=")

    def _secret(self) -> bytes:
        with self._lock:
            if self._known is None:
                self._known = self._written() or self._made()
            return self._known

    def _written(self) -> bytes | None:
        try:
            secret = bytes.fromhex(self._file.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):  # a spoilt file is mended by a new secret, like a missing one
            return None
        except OSError as failure:
            raise _unusable(self._file, failure) from failure
        return secret if len(secret) == _SECRET_BYTES else None

    def _made(self) -> bytes:
        secret = secrets.token_bytes(_SECRET_BYTES)
        try:
            write_private(self._file, secret.hex())
        except OSError as failure:
            raise _unusable(self._file, failure) from failure
        return secret


def _unusable(file: Path, failure: OSError) -> Unavailable:
    return Unavailable(
        f"the file {file} cannot be used: {failure.strerror}",
        mend="let the server read and write its data folder, or sign in by API key alone",
    )
