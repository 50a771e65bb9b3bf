"""Fingerprints of servers' keys, by which clients verify a server whose certificate is self-signed.

A fingerprint is the SHA-256 of the public key (SubjectPublicKeyInfo, as in RFC 7469), in hexadecimal. It depends on the
key and not on the certificate, so clients accept a renewed certificate with the same key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from typing import TYPE_CHECKING, Final

from share_compute.errors import UserError, WrongFingerprint
from share_compute.store.secret import is_invite_code

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

WHOLE_INVITE: Final = "copy the whole invite: code, dot and fingerprint, as share-compute invite printed it"
"""Hint for an invite that is cut off."""
_HEXADECIMAL: Final = re.compile("[0-9a-f]{64}")


def fingerprint_of(certificate: Certificate) -> str:
    """Return the fingerprint of a certificate's key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key).hexdigest()


def parse_fingerprint(text: str) -> str:
    """Return a fingerprint as 64 lower-case hexadecimal digits; a prefix ``sha256:``, colons and capitals are accepted.

    Raises:
        UserError: the text is not a fingerprint.
    """
    plain = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if _HEXADECIMAL.fullmatch(plain) is None:
        raise UserError(
            f"{text!r} is not a fingerprint: it is {len(plain)} characters long, not 64 hexadecimal ones",
            hint="copy the whole invite, or what `share-compute up` shows as fingerprint",
        )
    return plain


def join_invite(code: str, fingerprint: str | None) -> str:
    """Return an invite's code with the server's fingerprint appended, so that users copy only one string."""
    return code if fingerprint is None else f"{code}.{fingerprint}"


def split_invite(text: str) -> tuple[str, str | None]:
    """Return the code and the fingerprint in an invite; the fingerprint is None if the invite has none.

    Raises:
        UserError: the code does not have the form of an invite's code, or the text after it is not a fingerprint.
    """
    code, dot, fingerprint = text.strip().partition(".")
    if not is_invite_code(code):
        raise _cut_off("it does not begin with four groups of four letters and digits")
    try:
        return code, parse_fingerprint(fingerprint) if dot else None
    except UserError as failure:
        raise _cut_off(failure.message) from failure


def _cut_off(problem: str) -> UserError:
    return UserError(f"the invite is cut off or mistyped: {problem}", hint=WHOLE_INVITE)


def pinned_context(fingerprint: str) -> ssl.SSLContext:
    """Return a TLS client context that accepts only the server with this fingerprint.

    The handshake raises `WrongFingerprint` if the server has another key, so no request is sent to it. Host names,
    validity dates and authorities are not checked.
    """
    context = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslsocket_class = _PinnedSocket
    context.sslobject_class = _PinnedObject
    context.fingerprint = fingerprint
    return context


class _PinnedContext(ssl.SSLContext):
    fingerprint: str

    def check(self, certificate: bytes | None) -> None:
        from cryptography.x509 import load_der_x509_certificate

        seen = "none" if certificate is None else fingerprint_of(load_der_x509_certificate(certificate))
        if not hmac.compare_digest(seen, self.fingerprint):
            raise WrongFingerprint(
                f"the server has the fingerprint {seen}, not {self.fingerprint}",
                hint="ask the operator for a new invite if the server has a new key; else somebody else answers there",
                details={"expected": self.fingerprint, "seen": seen},
            )


class _PinnedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        assert isinstance(self.context, _PinnedContext)
        try:
            self.context.check(self.getpeercert(binary_form=True))
        except WrongFingerprint:
            self.close()
            raise


class _PinnedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        assert isinstance(self.context, _PinnedContext)
        self.context.check(self.getpeercert(binary_form=True))
