"""Keys, codes and invites: where they are shown and kept, and how guesses of them are slowed down."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from fastapi import Request
from tests.api.agent.test_joining import wanted
from tests.api.conftest import Plane
from tests.security.planes import CLUSTER, open_plane
from tests.warm_commands import run_warm

from share_compute.errors import InviteUnknown, InviteUsed, TooManyAttempts, VersionMismatch
from share_compute.scopes import Scope
from share_compute_api.agent.client import join, preflight
from share_compute_api.client.client import Client
from share_compute_api.schemas.agents import PreflightRequest
from share_compute_api.schemas.bodies import Versions
from share_compute_api.schemas.versions import local_versions
from share_compute_api.server.guesses import Guesses
from share_compute_api.server.sign_in_codes import LIFE

OURS = {"Sec-Fetch-Site": "same-origin"}
ELSEWHERE = {"X-Forwarded-For": "192.0.2.9", "X-Forwarded-Proto": "https"}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """A server behind a proxy, so that a test can come from any address."""
    with open_plane(tmp_path, cluster=True, proxy_addresses="127.0.0.1") as plane:
        yield plane


def test_health_tells_no_versions_and_no_addresses(plane: Plane) -> None:
    answer = httpx.get(f"{plane.url}/api/v1/health")
    assert answer.json().keys() == {"status", "time"}
    assert "server" not in answer.headers


def test_what_a_joining_machine_needs_is_returned_for_an_invite_that_stays_unused(plane: Plane) -> None:
    _, code = plane.store.invites.create()
    ours = local_versions()
    assert (
        preflight(plane.url, PreflightRequest(invite=code, versions=ours)).ray_address == CLUSTER.ray_address
    )
    other = Versions(**{**ours.model_dump(), "ray": "2.59.0"})
    with pytest.raises(VersionMismatch, match="2\\.59\\.0"):
        preflight(plane.url, PreflightRequest(invite=code, versions=other))
    with pytest.raises(InviteUnknown) as refused:
        preflight(plane.url, PreflightRequest(invite="none", versions=other))
    assert ours.ray not in str(refused.value.facts())
    join(plane.url, wanted(code))
    with pytest.raises(InviteUsed):
        preflight(plane.url, PreflightRequest(invite=code, versions=ours))


def guess(plane: Plane, kind: str, **headers: str) -> httpx.Response:
    url = f"{plane.url}/api/v1"
    match kind:
        case "key":
            return httpx.get(f"{url}/status", headers={"Authorization": "Bearer sck_wrong", **headers})
        case "openai":
            return httpx.get(
                f"{plane.url}/v1/models", headers={"Authorization": "Bearer sck_wrong", **headers}
            )
        case "sign-in":
            return httpx.post(f"{url}/session", json={"key": "sck_wrong"}, headers={**OURS, **headers})
        case "code":
            return httpx.post(f"{url}/session", json={"code": "wrong"}, headers={**OURS, **headers})
        case "contributor":
            bearer = {"Authorization": "Bearer scc_wrong"}
            return httpx.post(f"{url}/contributors/con-x/heartbeat", headers={**bearer, **headers})
        case _:
            body = wanted("none").model_dump(mode="json")
            return httpx.post(f"{url}/contributors", json=body, headers=headers)


@pytest.mark.parametrize("kind", ["key", "openai", "sign-in", "code", "contributor", "invite"])
def test_guesses_are_slowed(plane: Plane, kind: str) -> None:
    answers = [guess(plane, kind, **ELSEWHERE) for _ in range(20)]
    assert {answer.status_code for answer in answers[:5]} == {401}
    # On a slow machine, the wait may be over before one of the later requests.
    refused = [answer for answer in answers[5:] if answer.status_code == 429]
    assert len(refused) >= 10
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    # Clients at other addresses are served, those on this machine too.
    assert guess(plane, kind, **{**ELSEWHERE, "X-Forwarded-For": "192.0.2.10"}).status_code == 401
    right = {"Authorization": f"Bearer {plane.api_key}"}
    assert httpx.get(f"{plane.url}/api/v1/status", headers=right).status_code == 200
    signed_in = httpx.post(f"{plane.url}/api/v1/session", json={"key": plane.api_key}, headers=OURS)
    assert signed_in.status_code == 201


def test_a_key_that_was_right_before_passes_beside_guesses(plane: Plane) -> None:
    right = {"Authorization": f"Bearer {plane.api_key}", **ELSEWHERE}
    assert httpx.get(f"{plane.url}/api/v1/status", headers=right).status_code == 200
    for _ in range(10):
        guess(plane, "key", **ELSEWHERE)
    assert httpx.get(f"{plane.url}/api/v1/status", headers=right).status_code == 200


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def request_from(address: str) -> Request:
    return Request({"type": "http", "headers": [], "client": (address, 1), "server": ("192.0.2.1", 8700)})


def wait_s(guesses: Guesses, address: str, secret: str = "wrong") -> int:
    """Return how long an address must wait; 0 if its guess was checked."""
    try:
        guesses.check(request_from(address), secret, lambda: None)
    except TooManyAttempts as refused:
        return refused.retry_after_s
    return 0


def test_the_wait_doubles_up_to_a_minute_and_is_forgiven() -> None:
    clock = Clock()
    guesses = Guesses(clock)
    waits = []
    for _ in range(14):
        if waited := wait_s(guesses, "192.0.2.9"):
            clock.now_s += waited
            assert wait_s(guesses, "192.0.2.9") == 0
        waits.append(waited)
    assert waits == [0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    clock.now_s += 1000
    assert [wait_s(guesses, "192.0.2.9") for _ in range(5)] == [0] * 5


def test_this_machine_waits_for_seconds_at_most_and_not_for_others() -> None:
    clock = Clock()
    guesses = Guesses(clock)
    for index in range(2000):
        wait_s(guesses, f"198.51.{index // 250}.{index % 250}")
    assert wait_s(guesses, "203.0.113.1") > 2  # guesses from everywhere
    assert [wait_s(guesses, "127.0.0.1") for _ in range(5)] == [0] * 5
    for _ in range(20):
        waited = wait_s(guesses, "127.0.0.1")
        assert waited <= 2
        clock.now_s += waited


@pytest.mark.slow
def test_memory_for_guesses_is_bounded() -> None:
    clock = Clock()
    guesses = Guesses(clock)

    def guess(first: int, last: int) -> int:
        """Guess from one address after the other; return the size of all objects afterwards, in bytes."""
        for index in range(first, last):
            clock.now_s += 1
            wait_s(guesses, f"10.{index // 65536}.{index // 256 % 256}.{index % 256}")
            guesses.check(request_from("192.0.2.1"), f"right {index}", lambda: True)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        third, whole = guess(0, 10_000), guess(10_000, 30_000)
    finally:
        tracemalloc.stop()
    assert whole < 1.2 * third


def test_a_sign_in_code_works_once_and_for_minutes(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(code: str) -> httpx.Response:
        return httpx.post(f"{plane.url}/api/v1/session", json={"code": code}, headers=OURS)

    def make() -> dict[str, Any]:
        key = {"Authorization": f"Bearer {plane.api_key}"}
        made: dict[str, Any] = httpx.post(f"{plane.url}/api/v1/session/codes", headers=key).json()
        return made

    made = make()
    assert made["url"].endswith(f"/#code={made['code']}")
    assert plane.api_key not in str(made)
    first = exchange(made["code"])
    assert (first.status_code, first.json()["key"]["name"]) == (201, "first")
    assert exchange(made["code"]).status_code == 401
    assert httpx.post(f"{plane.url}/api/v1/session/codes").status_code == 401
    for body in ({}, {"key": "a", "code": "b"}):
        assert httpx.post(f"{plane.url}/api/v1/session", json=body, headers=OURS).status_code == 422
    late, revoked = make()["code"], make()["code"]
    start = plane.store.clock()
    with monkeypatch.context() as patched:
        patched.setattr(plane.store, "clock", lambda: start + LIFE + timedelta(seconds=1))
        assert exchange(late).status_code == 401
    (key,) = plane.store.keys.list()
    plane.store.keys.create("second", [Scope.admin])  # the last admin key cannot be revoked
    plane.store.keys.revoke(key.id)
    assert exchange(revoked).status_code == 401


def test_the_command_makes_a_link_without_the_key(plane: Plane) -> None:
    environment = {**os.environ, "SHARE_COMPUTE_URL": plane.url, "SHARE_COMPUTE_API_KEY": plane.api_key}
    done = run_warm(["sign-in"], environment)
    assert done.returncode == 0, done.stderr
    code = done.stdout.strip().partition("/#code=")[2]
    assert plane.api_key not in done.stdout + done.stderr
    assert httpx.post(f"{plane.url}/api/v1/session", json={"code": code}, headers=OURS).status_code == 201


def test_compose_has_no_default_password() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert "POSTGRES_PASSWORD:-" not in text
    services = yaml.safe_load(text)["services"]
    assert services["database"]["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    for service in services.values():
        assert "--invite" not in service.get("command", [])
    assert "\nUSER contributor\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "text", "words"),
    [
        ([], None, "=CODE share-compute join http://127.0.0.1:9"),
        (["--invite-file", "missing"], None, "missing"),
        (["--invite-file", "-"], " \n", "empty"),
    ],
)
def test_an_invite_that_is_not_there(arguments: list[str], text: str | None, words: str) -> None:
    done = run_warm(["join", "http://127.0.0.1:9", *arguments], os.environ, text=text or "")
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.slow
def test_a_run_leaves_nothing_for_others_to_read(
    tmp_path: Path, run_server: Any, run_command: Any, wait_for: Any
) -> None:
    """A server with TLS, and a machine that joins by a file: modes of all files, output, and arguments in ``ps``."""
    before = os.umask(0o022)
    try:
        folder = tmp_path / "data"
        with run_server(folder, "--tls", "self-signed") as server:
            facts = server.command.first_json()
            assert facts["dashboard_url"].startswith(f"{server.url}/#code=")
            with Client(server.url, server.api_key, data_folder=folder) as client:
                made = client.create_invite(label="ada")
                invite = tmp_path / "invite"
                invite.write_text(made.code + "\n")
                given = ("--memory", "600MiB", "--cpu-threads", "1", "--device", "cpu", "--json")
                arguments = ("join", server.url, "--name", "ada", "--invite-file", str(invite), *given)
                with run_command(tmp_path, *arguments) as joined:
                    wait_for(
                        lambda: "being measured" in joined.text() or "ready" in joined.text(), "the machine"
                    )
                    shown = " ".join(
                        word
                        for process in psutil.process_iter(["cmdline"])
                        for word in process.info["cmdline"] or []
                    )
                    output = server.command.text() + joined.text()
            code = made.code.partition(".")[0]
            token = (folder / "ray-token").read_text()
            for secret in (server.api_key, code, token):
                assert secret not in shown
                assert secret not in output
            loose = {
                str(path.relative_to(folder)): oct(path.stat().st_mode & 0o777)
                for path in folder.rglob("*")
                if path.exists()
                and not path.is_symlink()
                and not path.is_socket()
                and path.stat().st_mode & 0o077
                and not path.name.startswith("up-")  # the log that this test writes
            }
            assert loose == {}
    finally:
        os.umask(before)
