"""Sessions of the dashboard: a browser stores a signed token instead of the API key that it signed in with.

The cookie contains the id of a key and an expiry, signed by itsdangerous with a secret of this server. Sessions need no
table and survive a restart. The key is looked up at each request, so revoking a key ends its sessions.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from itsdangerous import BadSignature, Signer

from share_compute.errors import Unavailable
from share_compute.files.durable import write_private

_RENEWED_AFTER: Final = timedelta(days=1)
_FILE: Final = "session-secret"
_SECRET_BYTES: Final = 32


class Sessions:
    """Issues and verifies session tokens.

    Args:
        folder: the data folder; the secret is created there when it is first needed.
        life: lifetime of a session since its start or last renewal.
    """

    def __init__(self, folder: Path, life: timedelta) -> None:
        self._life = life
        self._file = folder / _FILE
        self._lock = threading.Lock()
        self._known: bytes | None = None

    @property
    def cookie(self) -> str:
        """Name of the cookie. It is unique to this server, because all ports of a host share a browser's cookies."""
        return f"share-compute-{self._signer('name').get_signature(b'').decode()[:8]}"

    def issue(self, key_id: str, now: datetime) -> tuple[str, datetime]:
        """Return a token for a key, and the time at which it expires."""
        expires_at = (now + self._life).replace(microsecond=0)
        token = self._signer("session").sign(f"{key_id}.{int(expires_at.timestamp())}")
        return token.decode(), expires_at

    def read(self, token: str, now: datetime) -> tuple[str, datetime] | None:
        """Return the key id and the expiry in a token; None if the signature is wrong or the token has expired."""
        try:
            content = self._signer("session").unsign(token).decode()
        except BadSignature:
            return None
        key_id, _, expiry = content.rpartition(".")
        expires_at = datetime.fromtimestamp(int(expiry), UTC)
        return (key_id, expires_at) if now < expires_at else None

    def is_due(self, expires_at: datetime, now: datetime) -> bool:
        """Return whether a session should be renewed.

        Renewal is due after one day, or after half the lifetime if that is shorter.
        """
        return expires_at - now < self._life - min(_RENEWED_AFTER, self._life / 2)

    def _signer(self, purpose: str) -> Signer:
        # itsdangerous's `TimestampSigner` reads the clock itself. Here the caller passes ``now``, so the expiry is part
        # of the signed content.
        return Signer(self._secret(), salt=purpose, key_derivation="hmac", digest_method=hashlib.sha256)

    def _secret(self) -> bytes:
        with self._lock:
            if self._known is None:
                self._known = self._written() or self._made()
            return self._known

    def _written(self) -> bytes | None:
        try:
            secret = bytes.fromhex(self._file.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):  # a damaged file is replaced like a missing file
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
        hint="let the server read and write its data folder, or sign in by API key alone",
    )
