"""The server's TLS certificate: the operator's own, or a self-signed one."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from share_compute.errors import Unavailable, UserError
from share_compute.files.durable import write_private
from share_compute.settings import Settings
from share_compute_api.connection.connections import is_loopback
from share_compute_api.connection.fingerprints import fingerprint_of

_LIFE: Final = timedelta(days=397)
"""Validity of a self-signed certificate."""
_RENEWED_BEFORE_END: Final = timedelta(days=30)
_CLOCKS_DIFFER: Final = timedelta(hours=1)
_FOLDER: Final = "tls"


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """The certificate that the server presents."""

    context: ssl.SSLContext = field(repr=False)
    fingerprint: str | None
    """Fingerprint by which clients verify the key; None for a certificate that an authority signed."""
    note: str | None = None
    """Warning for the operator about a new key; None if there is none."""


def server_certificate(
    settings: Settings, address: str, now: datetime | None = None
) -> ServerCertificate | None:
    """Load the certificate that the settings select, or create a self-signed one; return None for plain HTTP.

    Args:
        settings: the choice of the certificate, and the data folder for a self-signed one.
        address: host name or IP address at which clients reach the server.
        now: the current time; default: the time of the system's clock.

    Raises:
        UserError: the settings contradict each other, or the files are not a certificate and its key.
        Unavailable: the certificate in the data folder cannot be read or written.
    """
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise UserError(
            "a certificate needs its key, and a key its certificate", hint="give --tls-cert and --tls-key"
        )
    if settings.tls_cert is not None and settings.tls_key is not None:
        if settings.tls is not None:
            raise UserError(
                "a certificate is given, and one is to be made",
                hint="leave out --tls, or --tls-cert and --tls-key",
            )
        return _given(settings.tls_cert, settings.tls_key)
    if settings.tls is None:
        return None
    return _own(settings.data_folder / _FOLDER, address, now or datetime.now(UTC))


def start_warnings(settings: Settings, certificate: ServerCertificate | None) -> Iterator[str]:
    """Yield warnings for the operator about a new TLS key or the use of plain HTTP."""
    if certificate is not None and certificate.note is not None:
        yield certificate.note
    is_behind_proxy = settings.public_url is not None or settings.proxies
    if (
        certificate is not None
        or is_behind_proxy
        or is_loopback(settings.host)
        or settings.host == "localhost"
    ):
        return
    if settings.insecure:
        yield "plain HTTP: an eavesdropper on the network can read API keys and the cluster's token (--insecure)"
    else:
        yield (
            "plain HTTP: other machines cannot join, since the cluster's token would be readable on the way; "
            "start with --tls self-signed, or with --insecure on a network where nobody listens"
        )


def _given(file: Path, key_file: Path) -> ServerCertificate:
    context = _context(file, key_file)
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    is_signed_by_another = certificate.issuer != certificate.subject
    return ServerCertificate(context, None if is_signed_by_another else fingerprint_of(certificate))


def _own(folder: Path, address: str, now: datetime) -> ServerCertificate:
    file, key_file = folder / "certificate.pem", folder / "key.pem"
    names = _names(address)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key, old = _read_key(key_file), _read_certificate(file)
        note = None
        if key is None:
            note = (
                "the server has a new key: machines that joined before, and old invites, do not know it"
                if old
                else None
            )
            key = ec.generate_private_key(ec.SECP256R1())
            write_private(key_file, _key_text(key))
            old = None
        if old is None or not _fits(old, key, names, now):
            write_private(file, _sign(key, names, now).public_bytes(serialization.Encoding.PEM).decode())
    except OSError as failure:
        raise Unavailable(
            f"the certificate in {folder} cannot be used: {failure.strerror}",
            hint="let the server read and write its data folder",
        ) from failure
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    return ServerCertificate(_context(file, key_file), fingerprint_of(certificate), note)


def _context(file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without the argument OpenSSL would prompt for a password at the terminal.
        context.load_cert_chain(file, key_file, password="")
    except (OSError, ValueError) as failure:
        raise UserError(
            f"{file} and {key_file} are no certificate and its key: {failure}",
            hint="give the certificate with its chain, and its key without a password, as PEM files",
        ) from failure
    return context


def _names(address: str) -> list[x509.GeneralName]:
    hosts = dict.fromkeys(["localhost", socket.gethostname(), "127.0.0.1", "::1", address.strip("[]")])
    return [_name(host) for host in hosts]


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _read_key(file: Path) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError):  # a damaged key is replaced, like a missing one
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _read_certificate(file: Path) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _fits(
    certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName],
    now: datetime,
) -> bool:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return (
        certificate.public_key() == key.public_key()
        and set(names) <= set(found)
        and certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc - _RENEWED_BEFORE_END
    )


def _key_text(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _sign(key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName], now: datetime) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "share-compute")])
    public = key.public_key()
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
