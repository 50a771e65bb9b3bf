"""HTTPS with real handshakes: which servers clients trust, and which data never travels unencrypted."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.agent.test_joining import wanted
from tests.api.cli.test_cli import JOB
from tests.api.conftest import Plane
from tests.security.certificates import trusting_context, write_certificate
from tests.security.planes import open_plane

from share_compute.errors import (
    InsecureTransport,
    Unavailable,
    UntrustedCertificate,
    UserError,
    WrongFingerprint,
)
from share_compute.settings import Settings
from share_compute_api.agent.client import AgentClient, fetch_health, join
from share_compute_api.client.client import Client
from share_compute_api.connection.certificates import ServerCertificate, server_certificate, start_warnings
from share_compute_api.connection.data_folder import write_server_file
from share_compute_api.connection.fingerprints import (
    fingerprint_of,
    join_invite,
    parse_fingerprint,
    split_invite,
)
from share_compute_api.connection.private import require_private_url
from share_compute_api.terminal.children import own_command

DEADLINE_S = 60.0
OTHER = "ab" * 32


def own(folder: Path, **changes: Any) -> ServerCertificate:
    certificate = server_certificate(Settings(data_folder=folder, tls="self-signed"), "192.0.2.1", **changes)
    assert certificate is not None
    return certificate


def test_a_pinned_client_speaks_with_the_server_of_that_key_alone(tmp_path: Path) -> None:
    certificate = own(tmp_path)
    with open_plane(tmp_path, cluster=True, tls=certificate.context) as plane:
        with Client(plane.url, plane.api_key, fingerprint=certificate.fingerprint) as client:
            assert plane.url.startswith("https:")
            assert client.health().status == "ok"
            job = client.submit(JOB.format(name="one"))
            assert next(client.follow(job.id)).job_id == job.id
        with (
            pytest.raises(WrongFingerprint) as caught,
            Client(plane.url, plane.api_key, fingerprint=OTHER) as client,
        ):
            client.health()
        assert caught.value.details == {"expected": OTHER, "seen": certificate.fingerprint}
        assert caught.value.hint
        _, code = plane.store.invites.create()
        joined = join(plane.url, wanted(code), certificate.fingerprint)
        with (
            AgentClient(plane.url, joined.contributor_id, joined.contributor_key, OTHER) as agent,
            pytest.raises(WrongFingerprint),
        ):
            agent.rejoin()
        _, code = plane.store.invites.create()
        with pytest.raises(WrongFingerprint):
            join(plane.url, wanted(code, "grace"), OTHER)
        plane.store.invites.check(code)  # unused


def test_nothing_is_sent_to_a_server_with_another_key(tmp_path: Path) -> None:
    """A man in the middle receives no key: the handshake fails."""
    context = own(tmp_path).context
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received: list[bytes] = []

        def impersonate() -> None:
            line, _ = listener.accept()
            with line:
                try:
                    with context.wrap_socket(line, server_side=True) as secure:
                        received.append(secure.recv(65536))
                except OSError:
                    received.append(b"")

        thread = threading.Thread(target=impersonate)
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(WrongFingerprint), Client(url, "sck_secret", fingerprint=OTHER) as client:
            client.status()
        thread.join(DEADLINE_S)
        assert received == [b""]


def test_without_a_fingerprint_authorities_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "own.pem", tmp_path / "own.key"
    write_certificate(*files, ["127.0.0.1"])
    settings = Settings(data_folder=tmp_path, tls_cert=files[0], tls_key=files[1])
    certificate = server_certificate(settings, "192.0.2.1")
    assert certificate is not None
    with open_plane(tmp_path, tls=certificate.context) as plane:
        with pytest.raises(UntrustedCertificate, match="self-signed") as caught:
            fetch_health(plane.url)
        assert "fingerprint" in (caught.value.hint or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
        assert fetch_health(plane.url).status == "ok"
        with pytest.raises(UntrustedCertificate, match=r"localhost|Hostname"):
            fetch_health(plane.url.replace("127.0.0.1", "localhost"))


def test_a_certificate_that_is_over_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "old.pem", tmp_path / "old.key"
    write_certificate(*files, ["127.0.0.1"], begins_in_s=-7200, life_s=3600)
    settings = Settings(data_folder=tmp_path, tls_cert=files[0], tls_key=files[1])
    certificate = server_certificate(settings, "192.0.2.1")
    assert certificate is not None
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    with (
        open_plane(tmp_path, tls=certificate.context) as plane,
        pytest.raises(UntrustedCertificate, match="expired"),
    ):
        fetch_health(plane.url)


def test_the_servers_own_certificate_names_what_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = own(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "tls" / "certificate.pem"))
    with open_plane(tmp_path, tls=certificate.context) as plane:
        for name in ("127.0.0.1", "localhost"):
            assert fetch_health(plane.url.replace("127.0.0.1", name)).status == "ok"
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "tls").iterdir()}
    assert modes == {"certificate.pem": 0o600, "key.pem": 0o600}


def test_a_certificate_is_renewed_with_the_same_key(tmp_path: Path) -> None:
    file = tmp_path / "tls" / "certificate.pem"
    now = datetime.now(UTC)
    first = own(tmp_path, now=now)
    before = file.read_bytes()
    assert own(tmp_path, now=now + timedelta(days=300)).fingerprint == first.fingerprint
    assert file.read_bytes() == before
    renewed = own(tmp_path, now=now + timedelta(days=390))
    assert file.read_bytes() != before
    assert (renewed.fingerprint, renewed.note) == (first.fingerprint, None)
    before = file.read_bytes()
    moved = server_certificate(Settings(data_folder=tmp_path, tls="self-signed"), "192.0.2.99", now)
    assert moved is not None
    assert moved.fingerprint == first.fingerprint
    assert file.read_bytes() != before
    (tmp_path / "tls" / "key.pem").write_text("spoilt")
    replaced = own(tmp_path)
    assert replaced.fingerprint != first.fingerprint
    assert "new key" in (replaced.note or "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tls_cert": "a.pem"}, "needs its key"),
        ({"tls_cert": "a.pem", "tls_key": "a.key", "tls": "self-signed"}, "one is to be made"),
        ({"tls_cert": "missing.pem", "tls_key": "missing.key"}, "missing.pem"),
        ({"tls_cert": "a.pem", "tls_key": "b.key"}, r"a\.pem and .*b\.key"),
    ],
)
def test_certificates_that_cannot_be_used(tmp_path: Path, given: dict[str, str], words: str) -> None:
    for name in "ab":
        write_certificate(tmp_path / f"{name}.pem", tmp_path / f"{name}.key", ["127.0.0.1"])
    paths = {name: value if name == "tls" else tmp_path / value for name, value in given.items()}
    with pytest.raises(UserError, match=words) as caught:
        server_certificate(Settings(data_folder=tmp_path, **paths), "192.0.2.1")  # type: ignore[arg-type]
    assert caught.value.hint


def test_an_invite_carries_the_fingerprint(tmp_path: Path) -> None:
    certificate = own(tmp_path)
    with open_plane(tmp_path, cluster=True, tls=certificate.context) as plane:
        plane.app.state.context.fingerprint = certificate.fingerprint
        with Client(plane.url, plane.api_key, fingerprint=certificate.fingerprint) as client:
            made = client.create_invite(label="ada")
        _, fingerprint = split_invite(made.code)
        assert fingerprint == certificate.fingerprint
        assert made.join_command.startswith(f"SHARE_COMPUTE_INVITE={made.code} share-compute join https://")
        assert join(plane.url, wanted(made.code), fingerprint).contributor_id  # the server takes the code


def test_fingerprints_are_read_as_people_write_them() -> None:
    shown = ":".join(["AB"] * 32)
    assert parse_fingerprint(f"SHA256:{shown}") == parse_fingerprint(f" {OTHER} ") == OTHER
    code = "abcd-efgh-ijkl-mnop"
    assert split_invite(join_invite(code, OTHER)) == (code, OTHER)
    assert split_invite(code) == (code, None)
    for wrong in (f"{code}.", f"{code}.12", f"{code}.{OTHER[:-1]}", f"{code}.{OTHER}0", code[:-1], "CODE"):
        with pytest.raises(UserError, match="cut off or mistyped"):
            split_invite(wrong)


def test_clients_of_this_machine_find_the_fingerprint(tmp_path: Path) -> None:
    certificate = own(tmp_path)
    with open_plane(tmp_path, tls=certificate.context) as plane:
        write_server_file(tmp_path, plane.url, certificate.fingerprint)
        (tmp_path / "credentials.json").write_text(f'{{"api_key": "{plane.api_key}"}}')
        with Client(data_folder=tmp_path) as client:
            assert client.status().url
        environment = {**os.environ, "SHARE_COMPUTE_DATA_FOLDER": str(tmp_path)}
        done = subprocess.run(
            own_command("status", "--json"), env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        elsewhere = {**environment, "SHARE_COMPUTE_URL": plane.url, "SHARE_COMPUTE_FINGERPRINT": OTHER}
        done = subprocess.run(
            own_command("status", "--json"), env=elsewhere, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "wrong-fingerprint" in done.stderr) == (5, True)


def test_half_made_handshakes_do_not_keep_others_out(tmp_path: Path) -> None:
    certificate = own(tmp_path)
    with (
        open_plane(tmp_path, tls=certificate.context, max_connections=64, request_head_s=DEADLINE_S) as plane,
        ExitStack() as stack,
    ):
        address = ("127.0.0.1", plane.server.port)
        clients = [
            stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S)) for _ in range(200)
        ]
        for client in clients[::2]:
            client.sendall(b"\x16\x03\x01")
        assert fetch_health(plane.url, certificate.fingerprint).status == "ok"
        # Connections that sent something are reset if the server had not read it yet.
        assert clients[1].recv(1) == b""


def test_a_handshake_that_takes_too_long_ends(tmp_path: Path) -> None:
    certificate = own(tmp_path)
    with open_plane(tmp_path, tls=certificate.context, request_head_s=0.3) as plane:
        with socket.create_connection(("127.0.0.1", plane.server.port), timeout=DEADLINE_S) as client:
            assert client.recv(1) == b""
        context = trusting_context()  # a handshake, and then half a request
        with (
            socket.create_connection(("127.0.0.1", plane.server.port), timeout=DEADLINE_S) as client,
            context.wrap_socket(client) as secure,
        ):
            secure.sendall(b"GET / HTTP/1.1\r\n")
            assert secure.recv(100).startswith(b"HTTP/1.1 408")


def test_the_wrong_scheme_gets_a_hint(tmp_path: Path) -> None:
    certificate = own(tmp_path)
    with open_plane(tmp_path / "tls", tls=certificate.context) as plane:
        with pytest.raises(Unavailable) as caught:
            fetch_health(plane.url.replace("https", "http"))
        assert "https" in (caught.value.hint or "")
    with open_plane(tmp_path / "plain") as plane:
        with pytest.raises(Unavailable) as caught:
            fetch_health(plane.url.replace("http", "https"))
        assert "https" in (caught.value.hint or "")


def sent(plane: Plane, **headers: str) -> httpx.Response:
    """Send a request to join, as a proxy forwards it."""
    _, code = plane.store.invites.create()
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = httpx.post(
        f"{plane.url}/api/v1/contributors",
        json=wanted(code, f"name-{code[:4]}").model_dump(mode="json"),
        headers=fields,
        timeout=60,
    )
    if answer.status_code == 403:
        plane.store.invites.check(code)  # unused
        problem = answer.json()
        assert problem["code"] == "insecure-transport"
        assert "--tls self-signed" in problem["hint"]
        assert "--insecure" in problem["hint"]
        assert "cluster-secret" not in answer.text
    return answer


def test_the_token_is_not_sent_over_plain_http_to_another_machine(tmp_path: Path) -> None:
    elsewhere = {"X_Forwarded_For": "192.0.2.9"}
    with open_plane(tmp_path / "proxied", cluster=True, proxy_addresses="127.0.0.1") as plane:
        assert sent(plane, **elsewhere).status_code == 403
        assert sent(plane, **elsewhere, X_Forwarded_Proto="http").status_code == 403
        assert sent(plane, **elsewhere, X_Forwarded_Proto="https").status_code == 201
        assert sent(plane).status_code == 201
        joined = join(plane.url, wanted(plane.store.invites.create()[1], "ada"))
        rejoined = httpx.post(
            f"{plane.url}/api/v1/contributors/{joined.contributor_id}/rejoin",
            headers={"Authorization": f"Bearer {joined.contributor_key}", "X-Forwarded-For": "192.0.2.9"},
            timeout=60,
        )
        assert (rejoined.status_code, rejoined.json()["code"]) == (403, "insecure-transport")
    with open_plane(tmp_path / "plain", cluster=True) as plane:
        # Requests through a proxy that is not configured count as those of another machine, whatever its headers say.
        assert sent(plane, **elsewhere, X_Forwarded_Proto="https").status_code == 403
        assert sent(plane, Via="1.1 proxy").status_code == 403
    with open_plane(tmp_path / "insecure", cluster=True, insecure=True) as plane:
        assert sent(plane, **elsewhere).status_code == 201


def test_joining_another_machine_over_plain_http_is_refused_before_anything_is_sent() -> None:
    for url in ("http://192.0.2.1:8700", "HTTP://192.0.2.1"):
        with pytest.raises(InsecureTransport, match="plain HTTP"):
            require_private_url(url)
    for url in ("https://192.0.2.1", "http://127.0.0.1:8700", "http://localhost:1", "http://[::1]:1"):
        require_private_url(url)
    command = own_command("join", "http://192.0.2.1:8700", "--json")
    environment = {**os.environ, "SHARE_COMPUTE_INVITE": "abcd-efgh-ijkl-mnop"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 5
    assert "--tls self-signed" in done.stderr


def test_the_operator_is_warned_of_plain_http() -> None:
    def warned(**changes: Any) -> str:
        return " ".join(start_warnings(Settings(**changes), None))

    assert "--tls self-signed" in warned(host="0.0.0.0")
    assert "--insecure" in warned(host="0.0.0.0", insecure=True)
    assert warned() == warned(host="0.0.0.0", proxy_addresses="192.0.2.1") == ""


def test_own_certificates_of_an_authority_need_no_fingerprint(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    authority_files = tmp_path / "ca.pem", tmp_path / "ca.key"
    authority = write_certificate(*authority_files, ["ca.example"])
    leaf = write_certificate(tmp_path / "leaf.pem", tmp_path / "leaf.key", ["127.0.0.1"])
    key = serialization.load_pem_private_key(authority_files[1].read_bytes(), None)
    signed = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.subject)
        .public_key(leaf.public_key())
        .serial_number(1)
        .not_valid_before(leaf.not_valid_before_utc)
        .not_valid_after(leaf.not_valid_after_utc)
        .sign(key, hashes.SHA256())  # type: ignore[arg-type]
    )
    (tmp_path / "leaf.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    settings = Settings(data_folder=tmp_path, tls_cert=tmp_path / "leaf.pem", tls_key=tmp_path / "leaf.key")
    certificate = server_certificate(settings, "192.0.2.1")
    assert certificate is not None
    assert certificate.fingerprint is None
    assert fingerprint_of(signed) == fingerprint_of(leaf)
