"""Signing in and out of the dashboard, in a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect
from tests.e2e.conftest import Cluster, Complaints
from tests.e2e.scenes import join

from share_compute.scopes import Scope

pytestmark = pytest.mark.browser

KEPT = (
    "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href, document.title])"
)


def test_no_script_can_read_the_key_nor_the_session(
    page: Page, cluster: Cluster, context: BrowserContext
) -> None:
    (cookie,) = context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
    assert cookie["expires"] == -1
    kept = page.evaluate(KEPT)
    assert cluster.key not in kept + str(cookie)
    assert str(cookie.get("value")) not in kept


def test_the_session_is_every_tabs_and_signing_out_ends_all(
    page: Page, cluster: Cluster, context: BrowserContext, complaints: Complaints
) -> None:
    other = context.new_page()
    complaints.listen(other)
    other.goto(f"{cluster.url}/jobs")
    expect(other.get_by_role("heading", name="Jobs", level=1)).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    for tab in (page, other):
        expect(tab.get_by_label("API key")).to_be_visible()
    assert context.cookies() == []
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible()


def test_a_session_outlives_a_reload_and_the_server(
    page: Page, cluster: Cluster, complaints: Complaints
) -> None:
    page.reload()
    expect(page.get_by_role("heading", name="First steps")).to_be_visible()
    cluster.server.stop()
    expect(page.get_by_text("Reconnecting")).to_be_visible()
    cluster.server.start()
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    join(cluster.store, "birch")
    expect(page.get_by_text("1 machine joined")).to_be_visible()
    # The browser logs requests that get no answer.
    complaints.clear()


def test_a_revoked_key_ends_the_session(page: Page, cluster: Cluster, complaints: Complaints) -> None:
    browsers = cluster.store.keys.list()
    cluster.store.keys.create("another operator", [Scope.admin])
    for record in browsers:
        cluster.store.keys.revoke(record.id)
    # The page does not wait for a click: the server ends its event stream.
    expect(page.get_by_text("Your session is over.")).to_be_visible()
    # The browser logs requests that the server refuses.
    assert [text for text in complaints if "401" not in text] == []
    complaints.clear()


def test_a_link_whose_key_is_unknown_says_so(cluster: Cluster, context: BrowserContext) -> None:
    page = context.new_page()
    page.goto(f"{cluster.url}/#key=sck_wrong")
    expect(
        page.get_by_text("This link was used already, has expired, or belongs to another server.")
    ).to_be_visible()
    assert page.url == f"{cluster.url}/"


class _Elsewhere(BaseHTTPRequestHandler):
    """A page of another site, on another port of the same host."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title><link rel=icon href=data:,>")

    def log_message(self, *words: Any) -> None:
        """Say nothing."""


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_page_of_another_port_can_do_nothing_with_the_session(
    page: Page, cluster: Cluster, elsewhere: str
) -> None:
    other = page.context.new_page()
    other.goto(elsewhere)
    # The browser takes both for one site, so it sends the cookie.
    ask = """async url => {
      const answer = await fetch(url, {method: "POST", mode: "no-cors", credentials: "include", body: "{}"});
      return answer.type;
    }"""
    with other.expect_event("response", lambda one: one.url.endswith("/invites")) as answer:
        assert other.evaluate(ask, f"{cluster.url}/api/v1/invites") == "opaque"
    # The cookie was sent, otherwise the status would be 401.
    assert answer.value.status == 403
    assert cluster.store.invites.list() == []
