"""Sessions of browsers: the cookie, its rights, which sites may send it, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.routes.test_rest import problem

from share_compute.scopes import Scope
from share_compute_api.connection import sse
from share_compute_api.server.sessions import Sessions

LIFE = timedelta(days=7)
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
OURS = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def browser(plane: Any) -> Iterator[httpx.Client]:
    """A page of the dashboard; it keeps cookies."""
    with httpx.Client(base_url=plane.url, headers=OURS) as client:
        yield client


def sign_in(browser: httpx.Client, key: str) -> httpx.Response:
    return browser.post("/api/v1/session", json={"key": key})


def test_a_key_is_exchanged_for_a_cookie_that_scripts_cannot_read(plane: Any, browser: httpx.Client) -> None:
    answer = sign_in(browser, plane.api_key)
    assert answer.status_code == 201
    assert answer.json()["key"]["name"] == "first"
    (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
    assert (cookie["secure"], cookie["max-age"], cookie["expires"], cookie["domain"]) == ("", "", "", "")
    assert plane.api_key not in answer.text + answer.headers["set-cookie"]
    assert browser.get("/api/v1/status").is_success
    assert browser.get("/v1/models").is_success
    assert browser.post("/api/v1/invites", json={}).status_code == 201
    assert browser.get("/api/v1/session").json() == answer.json()


def test_a_wrong_key_gets_no_cookie_and_nobody_is_signed_in(browser: httpx.Client) -> None:
    answer = sign_in(browser, "sck_wrong")
    problem(answer, 401, "not-authorized")
    assert "set-cookie" not in answer.headers
    assert browser.get("/api/v1/session").json() == {"key": None, "expires_at": None, "last_event": None}
    problem(browser.get("/api/v1/status"), 401, "not-authorized")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "{own}"},
    ],
)
def test_other_sites_change_nothing_with_it(
    plane: Any, browser: httpx.Client, headers: dict[str, str]
) -> None:
    sign_in(browser, plane.api_key)
    headers = {name: text.format(own=plane.url) for name, text in headers.items()}
    with httpx.Client(base_url=plane.url, cookies=browser.cookies, headers=headers) as other:
        for method, path in (
            ("POST", "/api/v1/invites"),
            ("DELETE", "/api/v1/keys/key-any"),
            ("POST", "/api/v1/session"),
            ("DELETE", "/api/v1/session"),
        ):
            problem(other.request(method, path, json={"key": plane.api_key}), 403, "other-site")
        answer = other.post("/v1/completions", json={"model": "any", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "other_site")
    assert plane.store.invites.list() == []


def test_where_the_browser_says_only_its_origin_that_decides(plane: Any, browser: httpx.Client) -> None:
    sign_in(browser, plane.api_key)
    with httpx.Client(base_url=plane.url, cookies=browser.cookies, headers={"Origin": plane.url}) as page:
        assert page.post("/api/v1/invites", json={}).status_code == 201


def test_other_sites_read_nothing_with_it_but_a_typed_address_does(plane: Any, browser: httpx.Client) -> None:
    sign_in(browser, plane.api_key)
    for site, status in (("cross-site", 403), ("same-site", 403), ("none", 200)):
        answer = browser.get("/api/v1/status", headers={"Sec-Fetch-Site": site})
        assert answer.status_code == status


def test_programs_with_a_key_come_from_anywhere(plane: Any, http: httpx.Client) -> None:
    del plane
    assert http.post("/invites", json={}, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 201


def test_a_key_that_is_sent_counts_more_than_the_cookie(plane: Any, browser: httpx.Client) -> None:
    sign_in(browser, plane.api_key)
    answer = browser.get("/api/v1/status", headers={"Authorization": "Bearer sck_wrong"})
    problem(answer, 401, "not-authorized")


def test_a_session_ends_with_its_key(plane: Any, browser: httpx.Client) -> None:
    record, key = plane.store.keys.create("lent", [Scope.read])
    sign_in(browser, key)
    assert browser.get("/api/v1/status").is_success
    plane.store.keys.revoke(record.id)
    problem(browser.get("/api/v1/status"), 401, "not-authorized")
    assert browser.get("/api/v1/session").json()["key"] is None


def test_a_stream_ends_with_its_key(
    plane: Any, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEPALIVE_S", 0.05)
    record, key = plane.store.keys.create("lent", [Scope.read])
    sign_in(browser, key)
    with browser.stream("GET", "/api/v1/events", timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        plane.store.keys.revoke(record.id)
        list(lines)  # until it ends


def test_a_session_outlives_the_server(plane: Any, browser: httpx.Client) -> None:
    sign_in(browser, plane.api_key)
    plane.restart()
    assert browser.get("/api/v1/status").is_success
    secret = plane.settings.data_folder / "session-secret"
    assert secret.stat().st_mode & 0o077 == 0


def test_signing_out_takes_the_cookie_back(plane: Any, browser: httpx.Client) -> None:
    sign_in(browser, plane.api_key)
    assert browser.delete("/api/v1/session").status_code == 204
    assert list(browser.cookies) == []
    problem(browser.get("/api/v1/status"), 401, "not-authorized")


def test_a_session_that_is_used_is_renewed_and_another_one_ends(
    plane: Any, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = sign_in(browser, plane.api_key).json()["expires_at"]
    assert "set-cookie" not in browser.get("/api/v1/session").headers
    start = plane.store.clock()
    monkeypatch.setattr(plane.store, "clock", lambda: start + timedelta(days=2))
    renewed = browser.get("/api/v1/session")
    assert "set-cookie" in renewed.headers
    assert renewed.json()["expires_at"] > begun
    monkeypatch.setattr(plane.store, "clock", lambda: start + timedelta(days=2) + LIFE)
    assert browser.get("/api/v1/session").json()["key"] is None


def test_only_this_servers_tokens_are_read(tmp_path: Path) -> None:
    ours, others = Sessions(tmp_path / "ours", LIFE), Sessions(tmp_path / "others", LIFE)
    token, _ = ours.issue("key-a", NOW)
    assert ours.read(token, NOW) == ("key-a", NOW + LIFE)
    assert ours.read(token, NOW + LIFE) is None
    assert others.read(token, NOW) is None
    assert ours.cookie != others.cookie
    key_id, expiry, mac = token.split(".")
    later = f"{key_id}.{int(expiry) + 1}.{mac}"
    for forged in (token.replace("key-a", "key-b"), later, token[:-1], token + "A", "", ".", "..", "a.b.é"):
        assert ours.read(forged, NOW) is None


def test_a_spoilt_secret_ends_sessions_and_a_new_one_is_made(tmp_path: Path) -> None:
    token, _ = Sessions(tmp_path, LIFE).issue("key-a", NOW)
    assert Sessions(tmp_path, LIFE).read(token, NOW) is not None
    (tmp_path / "session-secret").write_text("x")
    assert Sessions(tmp_path, LIFE).read(token, NOW) is None
    assert len((tmp_path / "session-secret").read_text()) == 64
