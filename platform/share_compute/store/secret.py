"""Ids that people read and secrets that machines keep. Only hashes of secrets reach the database."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets


def new_id(prefix: str) -> str:
    """Return ``prefix-`` and 8 base32 characters: 40 random bits, short enough to type."""
    return f"{prefix}-{base64.b32encode(secrets.token_bytes(5)).decode().lower()}"


def new_key(prefix: str) -> str:
    """Return a secret of 256 random bits; the prefix tells keys apart in logs and secret scanners."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def new_invite_code() -> str:
    """Return 80 random bits as four groups of four characters, for reading aloud and pasting."""
    text = base64.b32encode(secrets.token_bytes(10)).decode().lower()
    return "-".join(text[start : start + 4] for start in range(0, len(text), 4))


def plain_invite_code(code: str) -> str:
    """Forgive what people change when they copy a code: case, spaces and dashes.

    A fingerprint of the server behind a dot is no part of it.
    """
    return "".join(letter for letter in code.partition(".")[0].lower() if letter.isalnum())


def digest(secret: str) -> str:
    """Return the SHA-256 of a secret, in hexadecimal.

    A slow password hash would add nothing: our secrets are random and long enough that guessing is hopeless.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def matches(secret: str, expected_digest: str) -> bool:
    """Compare in time that does not depend on where the difference is."""
    return hmac.compare_digest(digest(secret), expected_digest)
