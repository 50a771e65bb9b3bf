"""Random ids, keys and invite codes. The database stores only hashes of keys and codes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets


def new_id(prefix: str) -> str:
    """Return ``prefix-`` and 8 base32 characters (40 random bits): short enough to type."""
    return f"{prefix}-{base64.b32encode(secrets.token_bytes(5)).decode().lower()}"


def new_key(prefix: str) -> str:
    """Return ``prefix_`` and 256 random bits in URL-safe base64. Secret scanners recognize the prefix."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def new_invite_code() -> str:
    """Return 80 random bits as four groups of four base32 characters."""
    text = base64.b32encode(secrets.token_bytes(10)).decode().lower()
    return "-".join(text[start : start + 4] for start in range(0, len(text), 4))


def is_invite_code(code: str) -> bool:
    """Return whether a text has the form of the codes of `new_invite_code`; case, spaces and hyphens do not matter."""
    return re.fullmatch("[a-z2-7]{16}", plain_invite_code(code)) is not None


def plain_invite_code(code: str) -> str:
    """Return the letters and digits before the first dot of an invite code, in lower case.

    The server's fingerprint may follow the dot.
    """
    return "".join(letter for letter in code.partition(".")[0].lower() if letter.isalnum())


def digest(secret: str) -> str:
    """Return the SHA-256 of a secret, in hexadecimal.

    A slow password hash is not needed: the secrets are random, and too long to guess.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def matches(secret: str, expected_digest: str) -> bool:
    """Return whether a secret has this digest, compared in constant time."""
    return hmac.compare_digest(digest(secret), expected_digest)
